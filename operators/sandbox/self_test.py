"""The self-test of the sandbox: whether this machine can make one, found out by running a program
in it.
"""

import functools

from operators.sandbox.bwrap import find, missing
from operators.sandbox.outside import SandboxError
from operators.sandbox.runner import SandboxLimits, ScriptTest, run


def fault() -> str | None:
    """Why no sandbox can be made on this machine, in three parts; None where a program has run in
    one.
    """
    reason, program = missing(), find()
    return reason if program is None or reason is not None else _probed(program)


@functools.cache
def _probed(program: str) -> str | None:
    try:
        (outcome,) = run("print(6 * 7)", [ScriptTest("")], SandboxLimits(time_s=10.0))
    except SandboxError as error:
        problem = str(error)
    else:
        if outcome.passed and outcome.output == "42\n":
            return None
        problem = f"the trial program {outcome.note or f'printed {outcome.output!r}'}"
    return (
        f"{program} cannot make a sandbox for model-written code on this machine: {problem}; allow"
        " unprivileged user namespaces (sysctl user.max_user_namespaces,"
        " kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in a"
        " container, its seccomp profile), and see docs/sandbox.md"
    )
