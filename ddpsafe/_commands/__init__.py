"""The commands of ``ddpsafe.cli``, one module each; imported when the command is called."""
