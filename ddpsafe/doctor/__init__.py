"""The doctor: finds what will break a job before it does."""

from ddpsafe.doctor._finding import Finding
from ddpsafe.doctor._matrix import Direction, Matrix
from ddpsafe.doctor._report import Report
from ddpsafe.doctor._runner import run

__all__ = ["Direction", "Finding", "Matrix", "Report", "run"]
