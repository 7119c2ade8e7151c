"""Runs in the process that called `launch`: plans, starts, watches, ends, explains."""
