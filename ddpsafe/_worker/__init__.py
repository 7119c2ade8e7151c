"""Runs in each rank: from the first line of the new process to its report and exit."""
