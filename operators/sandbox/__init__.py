"""Runs programs that nobody has read: each in a sandbox of its own, or not at all."""

from operators.sandbox.runner import Call, Check, Limits, Outcome, SandboxError, Script, Test, run
from operators.sandbox.self_test import fault

__all__ = ["Call", "Check", "Limits", "Outcome", "SandboxError", "Script", "Test", "fault", "run"]
