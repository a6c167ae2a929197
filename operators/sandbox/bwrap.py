"""Bubblewrap: where it is, how it is called, and the start, the last words and the memory of
what runs in it."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dataflow.errors import RunError

VARIABLE = "DATAFLOW_BWRAP"
"""Environment variable with the path of bubblewrap's program, where it is not on PATH."""
_INSIDE = Path(__file__).parent / "inside"
_START = (
    "import sys; sys.path.append('/sandbox'); from inside.first import main; sys.path.pop(); main()"
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_INSTALL = (
    "install bubblewrap (package `bubblewrap`: apt, dnf, pacman, apk), or name its program in"
    f" {VARIABLE}; code is never run without a sandbox"
)


def find() -> str | None:
    """The path of bubblewrap's program; None where there is none."""
    return shutil.which(os.environ.get(VARIABLE) or "bwrap")


def missing() -> str | None:
    """Why bubblewrap cannot be called on this machine, in three parts; None where its program is
    there.
    """
    if not sys.platform.startswith("linux"):
        return (
            f"model-written code runs in a sandbox of Linux, but this is {sys.platform}; run it on"
            " Linux"
        )
    if find() is not None:
        return None
    named = os.environ.get(VARIABLE)
    where = (
        f"{VARIABLE} names {named!r}, which is no program" if named else "`bwrap` is not on PATH"
    )
    return f"model-written code needs bubblewrap as its sandbox, but {where}; {_INSTALL}"


def command(
    program: str, tmp_bytes: int, *, programs: bool = False, folders: Sequence[str] = ()
) -> list[str]:
    """What starts a sandbox: no network, no privileges, no environment, files as listed here,
    read-only.

    tmp_bytes: size of /tmp, in memory, the only folder that can be written. programs: whether the
    system's programs can be started. folders: more that can be read, under their own names.
    """
    files = (*(_programs() if programs else ()), *_files())
    more = [part for folder in folders for part in ("--ro-bind", folder, folder)]
    return [
        program,
        "--unshare-user",
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
        "--cap-drop",
        "ALL",
        "--uid",
        "65534",
        "--gid",
        "65534",
        "--hostname",
        "sandbox",
        "--clearenv",
        "--setenv",
        "PYTHONHASHSEED",
        "0",
        *files,
        "--ro-bind",
        str(_INSIDE),
        "/sandbox/inside",
        "--size",
        str(tmp_bytes),
        "--tmpfs",
        "/tmp",
        *more,
        "--remount-ro",
        "/",
        "--chdir",
        "/tmp",
        str(_interpreter()),
        "-s",
        "-P",
        "-S",
        "-B",
        "-X",
        "utf8",
        "-c",
        _START,
    ]


@functools.cache
def _programs() -> tuple[str, ...]:
    """The system's programs, and what they look for beside the libraries."""
    options: list[str] = ["--ro-bind", "/usr", "/usr"]
    for folder in map(Path, ("/bin", "/sbin")):
        if folder.is_symlink():
            options += ["--symlink", str(folder.readlink()), str(folder)]
        else:
            options += ["--ro-bind-try", str(folder), str(folder)]
    return (*options, "--ro-bind-try", "/etc/alternatives", "/etc/alternatives")


@functools.cache
def _files() -> tuple[str, ...]:
    """Python's own library, the system's shared libraries, and three devices."""
    options: list[str] = []
    for folder in map(Path, _LIBRARIES):
        if folder.is_symlink():
            options += ["--symlink", str(folder.readlink()), str(folder)]
        else:
            options += ["--ro-bind-try", str(folder), str(folder)]
    python = _interpreter()
    own = [python, *(python.parent.parent / name for name in ("lib", "lib64"))]
    for path in (*own, Path("/etc/ld.so.cache")):
        if str(path) not in _LIBRARIES and not path.is_symlink():
            options += ["--ro-bind-try", str(path), str(path)]
    for device in _DEVICES:
        options += ["--dev-bind", device, device]
    return tuple(options)


@functools.cache
def _interpreter() -> Path:
    """The interpreter that this one is, outside of any virtual environment."""
    plain = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return (plain if plain.is_file() else Path(sys.executable)).resolve()


_SHOWN = 500
_PAGE = os.sysconf("SC_PAGE_SIZE")


class SandboxError(RunError):
    """The sandbox itself failed: nothing is known about the program."""


def started(
    tmp_bytes: int, *, programs: bool = False, folders: Sequence[str] = (), **files: Any
) -> subprocess.Popen[bytes]:
    """A sandbox, as `command` has it. files: for Popen. Raises SandboxError where there is none."""
    program = find()
    if program is None:
        raise SandboxError(missing() or "bubblewrap was there a moment ago; try again")
    try:
        words = command(program, tmp_bytes, programs=programs, folders=folders)
        return subprocess.Popen(words, env={}, **files)
    except OSError as error:
        raise SandboxError(
            f"{program} cannot be started ({error}); mend it, or install bubblewrap anew"
        ) from error


def refuse(value: object) -> int:
    """For `wire.encode`: nothing but plain data goes into a sandbox."""
    raise TypeError(f"{value!r} is no plain data")


def last_words(errors: bytes | bytearray) -> str:
    """What a sandbox wrote to its errors, for the end of a sentence."""
    lines = bytes(errors).decode("utf-8", "replace").strip().splitlines()
    return (
        f"it said: {' / '.join(lines[-3:])[:_SHOWN]}"
        if lines
        else "it said nothing: look in the system's log"
    )


def threads_below(pid: int) -> int:
    """Threads of a process and of all that descend from it; as far as they can still be seen."""
    return sum(threads for _, threads in _family(pid))


def held_below(pid: int, held_by: Callable[[int], int]) -> int:
    """Bytes of memory that a process and all that descend from it hold; as far as can be seen."""
    total = 0
    for member, _ in _family(pid):
        with contextlib.suppress(OSError, ValueError):
            total += held_by(member)
    return total


def private_bytes(pid: int) -> int:
    """Of a process, without files that it has mapped; memory that forks have in common counts for
    each.
    """
    resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * _PAGE


def shared_out_bytes(pid: int) -> int:
    """The same with what forks have in common shared out among them; slower, and hidden of
    processes that hide.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except PermissionError:
        return private_bytes(pid)
    shares = [int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:")]
    return sum(shares) if shares else private_bytes(pid)


def _family(pid: int) -> Iterator[tuple[int, int]]:
    """A process and all that descend from it, each with its threads. Parents come before their
    children, and of one that ends meanwhile the rest is seen.
    """
    todo = [pid]
    while todo:
        current, threads = todo.pop(), 0
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{current}/task").iterdir():
                threads += 1
                with contextlib.suppress(OSError):  # a thread that has ended
                    todo += map(int, (task / "children").read_text().split())
        yield current, threads
