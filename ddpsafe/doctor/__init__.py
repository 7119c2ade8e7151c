"""The doctor: finds what will break a job before it does."""

from ddpsafe.doctor._report import Direction, Finding, Matrix, Report
from ddpsafe.doctor._run import run

__all__ = ["Direction", "Finding", "Matrix", "Report", "run"]
