"""Runs untrusted programs: each in a sandbox of its own, or not at all."""

from operators.sandbox.bwrap import SandboxError
from operators.sandbox.runner import (
    CallTest,
    PythonTest,
    SandboxLimits,
    SandboxResult,
    ScriptTest,
    Test,
    fault,
    run,
)

__all__ = [
    "CallTest",
    "PythonTest",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "ScriptTest",
    "Test",
    "fault",
    "run",
]
