"""Where the copies of a run go: looked at, and taken, before the run begins, by a process that can
be given up.

A file system may hang; and a client of an object store has threads, which nobody may have who forks
a run's workers.
"""

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.errors import GraphError, RunError
from dataflow.folder.copies.address import checked, is_folder
from dataflow.folder.copies.parts import CONFIG, Copies, TakenUp
from dataflow.folder.copies.store_process import answer
from dataflow.folder.run_folder import RunFolder
from dataflow.system.child import Child, ended_within, fork, program

ANSWER_S = 20.0
"""For an address to take a file of a hundred bytes."""
NOWHERE = ""
START_S = 30.0
"""For the process that asks it to begin."""
KILL_S = 1.0
_ERRORS = {kind.__name__: kind for kind in (GraphError, TakenUp)}


def copies_of(
    folder: RunFolder,
    trainers: Sequence[str],
    config: Mapping[str, Any] | None,
    checkpoint_to: str | None,
) -> Copies | None:
    """Where the run in a folder has its copies; None: nowhere. It is taken for it, and was written
    to.

    trainers: folders of those that keep checkpoints. config: what a run said of itself that goes
    on; None: it is new. checkpoint_to: as the user gives it now; None: as it was; empty: nowhere
    from now on. Errors: GraphError for an address that takes nothing in time; TakenUp where the run
    was taken up from it.
    """
    if checkpoint_to == NOWHERE:
        return None
    before = Copies.from_plain((config or {}).get(CONFIG))
    address = None if checkpoint_to is None else checked(checkpoint_to)
    if before is not None and address in (None, before.address):
        ask("check", before.address, copies=before.to_plain())
        return before
    if address is None:
        return None
    found = ask(
        "claim", address, text=address, run=folder.path.name, trainers=list(trainers), after=None
    )
    return Copies.from_plain(found)


def ask(do: str, address: str, answer_s: float = ANSWER_S, **given: Any) -> Any:
    """What one of `asked.TASKS` returns, from a process of its own that is killed when it takes too
    long: a fork for a folder of this machine, a fresh one for all else, as a fork of a process that
    has such a client cannot use it.

    Errors: what it raises, as GraphError, TakenUp or RunError; GraphError where the address hangs
    or takes nothing.
    """
    reads, writes = os.pipe()
    try:
        child: Child
        if is_folder(address):
            child = fork(lambda: answer(do, given, writes), keep=[writes])
        else:
            asked = json.dumps({"do": do, **given})
            child = program(
                "dataflow.folder.copies",
                asked,
                str(writes),
                keep=[writes],
                stdin=subprocess.DEVNULL,
            )
        os.close(writes)
        line = _line(reads, answer_s) if _line(reads, START_S) else b""
        child.kill()
        ended_within(child, KILL_S)  # one that hangs in the kernel is left to it
    finally:
        os.close(reads)
    if not line:
        raise GraphError(
            f"checkpoints cannot go to '{address}', nor come from there: it did not answer within"
            f" {answer_s:.0f} s; look whether it is reached from here, or give another address"
        )
    said = json.loads(line)
    if "error" not in said:
        return said["value"]
    if said["error"] == "CopyError":
        raise GraphError(
            f"checkpoints cannot go to '{address}', nor come from there: {said['text']}; look"
            " whether it is reached from here and may be written, or give another address"
        )
    raise _ERRORS.get(said["error"], RunError)(said["text"])


def _line(pipe: int, within_s: float) -> bytes:
    """A line of a pipe, and nothing after it; empty where none came, or the other end was
    closed.
    """
    deadline, found = time.monotonic() + within_s, b""
    while not found.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0] or not (one := os.read(pipe, 1)):
            return b""
        found += one
    return found
