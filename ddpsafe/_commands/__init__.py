"""What the commands of ``ddpsafe.cli`` do; loaded when one of them is called."""
