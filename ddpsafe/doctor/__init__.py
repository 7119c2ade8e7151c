"""The doctor: finds what will break a job before it does."""

from ddpsafe.doctor._examine import run
from ddpsafe.doctor._findings import Direction, Finding, Matrix, Report

__all__ = ["Direction", "Finding", "Matrix", "Report", "run"]
