"""Bubblewrap: where it is, how it is called, and whether it can make a sandbox on this machine."""

import functools
import os
import shutil
import sys
from pathlib import Path

VARIABLE = "DATAFLOW_BWRAP"
"""Environment variable with the path of bubblewrap's program, where it is not on PATH."""
_INSIDE = Path(__file__).parent / "inside"
_START = "import sys; sys.path.append('/sandbox'); from inside.driver import main; main()"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_INSTALL = (
    f"install bubblewrap (package `bubblewrap`: apt, dnf, pacman, apk), or name its program in {VARIABLE}; "
    f"code is never run without a sandbox"
)


def find() -> str | None:
    """The path of bubblewrap's program; None where there is none."""
    return shutil.which(os.environ.get(VARIABLE) or "bwrap")


def fault() -> str | None:
    """Why no sandbox can be made on this machine, in three parts; None where a program has run in one."""
    if not sys.platform.startswith("linux"):
        return f"model-written code runs in a sandbox of Linux, but this is {sys.platform}; run it on Linux"
    program = find()
    if program is None:
        named = os.environ.get(VARIABLE)
        where = f"{VARIABLE} names {named!r}, which is no program" if named else "`bwrap` is not on PATH"
        return f"model-written code needs bubblewrap as its sandbox, but {where}; {_INSTALL}"
    return _probed(program)


@functools.cache
def _probed(program: str) -> str | None:
    from operators.sandbox.runner import Limits, SandboxError, Script, run

    try:
        (outcome,) = run("print(6 * 7)", [Script("")], Limits(time_s=10.0))
    except SandboxError as error:
        found = str(error)
    else:
        if outcome.passed and outcome.output == "42\n":
            return None
        found = f"the trial program {outcome.note or f'printed {outcome.output!r}'}"
    return (
        f"{program} cannot make a sandbox for model-written code on this machine: {found}; allow unprivileged user "
        f"namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
        f"kernel.apparmor_restrict_unprivileged_userns; in a container, its seccomp profile), and see docs/sandbox.md"
    )


def command(program: str, tmp_bytes: int) -> list[str]:
    """What starts the driver in a sandbox: no network, no privileges, no environment, files as listed here, read-only.

    tmp_bytes: size of /tmp, in memory, the only folder that can be written.
    """
    return [
        program, "--unshare-user", "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1",
        "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox",
        "--clearenv", "--setenv", "PYTHONHASHSEED", "0",
        *_files(), "--ro-bind", str(_INSIDE), "/sandbox/inside",
        "--size", str(tmp_bytes), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp",
        str(_interpreter()), "-s", "-P", "-S", "-B", "-X", "utf8", "-c", _START,
    ]  # fmt: skip


@functools.cache
def _files() -> tuple[str, ...]:
    """Python's own library, the system's shared libraries, and three devices."""
    given: list[str] = []
    for folder in map(Path, _LIBRARIES):
        if folder.is_symlink():
            given += ["--symlink", str(folder.readlink()), str(folder)]
        else:
            given += ["--ro-bind-try", str(folder), str(folder)]
    python = _interpreter()
    own = [python, *(python.parent.parent / name for name in ("lib", "lib64"))]
    for path in (*own, Path("/etc/ld.so.cache")):
        if str(path) not in _LIBRARIES and not path.is_symlink():
            given += ["--ro-bind-try", str(path), str(path)]
    for device in _DEVICES:
        given += ["--dev-bind", device, device]
    return tuple(given)


@functools.cache
def _interpreter() -> Path:
    """The interpreter that this one is, outside of any virtual environment."""
    plain = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return (plain if plain.is_file() else Path(sys.executable)).resolve()
