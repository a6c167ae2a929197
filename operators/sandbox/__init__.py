"""Runs programs that nobody has read: each in a sandbox of its own, or not at all."""

from operators.sandbox.bwrap import fault
from operators.sandbox.runner import Check, Limits, Outcome, SandboxError, Script, run

__all__ = ["Check", "Limits", "Outcome", "SandboxError", "Script", "fault", "run"]
