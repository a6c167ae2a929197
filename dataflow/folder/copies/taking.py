"""Where the copies of a run go: looked at, and taken, before the run begins, by a process that can be given up.

A file system may hang, and a client of an object store has threads, which nobody may have who forks a run's workers.
"""

import json
import os
import select
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dataflow.errors import DataflowError, GraphError, RunError
from dataflow.folder.copies.address import Address
from dataflow.folder.copies.parts import CONFIG, Copies, TakenUp, claim
from dataflow.folder.run_folder import RunFolder
from dataflow.system.child import ended_within, fork

ANSWER_S = 10.0
"""For an address to take a file of a hundred bytes."""
KILL_S = 1.0
_ERRORS = {kind.__name__: kind for kind in (GraphError, TakenUp)}


def copies_of(
    folder: RunFolder, trainers: Sequence[str], config: Mapping[str, Any] | None, checkpoint_to: str | None,
    answer_s: float = ANSWER_S,
) -> Copies | None:  # fmt: skip
    """Where the run in a folder has its copies; None: nowhere. It is taken for it, and was written to.

    trainers: folders of those that keep checkpoints. config: what a run said of itself that goes on; None: it is new.
    checkpoint_to: as the user gives it now; None: as it was. Errors: GraphError for an address that takes nothing in
    time; TakenUp where the run was taken up from it.
    """
    before = Copies.from_plain((config or {}).get(CONFIG))
    address = None if checkpoint_to is None else Address.of(checkpoint_to)
    if before is not None and (address is None or address.text == before.address):
        known = before
        aside(lambda: known.check(Address.of(known.address)), known.address, answer_s)
        return before
    if address is None:
        return None
    chosen, after = address, None if config is None else 0

    def take() -> dict[str, Any]:
        return claim(chosen, chosen.text, folder.path.name, trainers, after).to_plain()

    return Copies.from_plain(aside(take, chosen.text, answer_s))


def aside(work: Callable[[], Any], text: str, answer_s: float = ANSWER_S) -> Any:
    """What `work` returns, plain values, from a fork of this process that is killed when it takes too long. text: the
    address, for people. Errors: what `work` raises, as GraphError, TakenUp or RunError; GraphError when it hangs."""
    reads, writes = os.pipe()

    def body() -> int:
        try:
            said = {"value": work()}
        except DataflowError as error:
            said = {"error": type(error).__name__, "text": str(error)}
        except Exception as error:
            said = {"error": "RunError", "text": f"'{text}' cannot be used: {type(error).__name__}: {error}"}
        os.write(writes, json.dumps(said).encode())
        return 0

    child = fork(body, keep=[writes])
    os.close(writes)
    try:
        ready, _, _ = select.select([reads], [], [], answer_s)
        content = os.read(reads, 1 << 16) if ready else b""
    finally:
        os.close(reads)
        child.kill()
        ended_within(child, KILL_S)  # one that hangs in the kernel is left to it
    if not content:
        raise GraphError(
            f"checkpoints cannot go to '{text}': it did not answer within {answer_s:.0f} s; look whether it is reached "
            f"from here, or leave checkpoint_to out"
        )
    said = json.loads(content)
    if "error" not in said:
        return said["value"]
    if said["error"] == "AddressError":
        raise GraphError(
            f"checkpoints cannot go to '{text}': {said['text']}; look whether it is reached from here and may be "
            f"written, or leave checkpoint_to out"
        )
    raise _ERRORS.get(said["error"], RunError)(said["text"])
