"""Recomputes from a run folder alone whether the run kept its laws."""

from dataflow.verify.verdict import Verdict, report, verify

__all__ = ["Verdict", "report", "verify"]
