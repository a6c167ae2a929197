"""Recomputes from a run folder alone whether the run kept its laws."""

from dataflow.history.verify.verdict import Verdict, report, verify

__all__ = ["Verdict", "report", "verify"]
