"""What both kinds of sandboxes need outside: the start, the last words, and the memory of their
processes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dataflow.errors import RunError
from operators.sandbox.bwrap import find, missing

_SHOWN = 500
_PAGE = os.sysconf("SC_PAGE_SIZE")


class SandboxError(RunError):
    """The sandbox itself failed: nothing is known about the program."""


def started(command: Callable[[str], list[str]], **files: Any) -> subprocess.Popen[bytes]:
    """A sandbox. command: from the path of bubblewrap's program. files: for Popen. Raises
    SandboxError where there is none.
    """
    program = find()
    if program is None:
        raise SandboxError(missing() or "bubblewrap was there a moment ago; try again")
    try:
        return subprocess.Popen(command(program), env={}, **files)
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
