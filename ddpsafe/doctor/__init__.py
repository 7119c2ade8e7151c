"""The doctor: finds what will break a job before it does."""
