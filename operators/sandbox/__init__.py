"""Runs programs that nobody has read: each in a sandbox of its own, or not at all."""

from operators.sandbox.bwrap import fault
from operators.sandbox.runner import Call, Check, Limits, Outcome, SandboxError, Script, Test, run

__all__ = ["Call", "Check", "Limits", "Outcome", "SandboxError", "Script", "Test", "fault", "run"]
