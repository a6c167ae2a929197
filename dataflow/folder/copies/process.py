"""What happens at the address of copies before a run begins: the run is found, claimed and brought
back, by a process of its own.

    python -m dataflow.folder.copies.process TASK ARGUMENTS

A file system may hang: this process is given up then. And a client of an object store has threads,
which a process must not have that forks workers.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from dataflow.errors import DataflowError, GraphError, RunError
from dataflow.folder.checkpoints import MARKER
from dataflow.folder.copies.store import (
    CONFIG,
    LEDGER,
    Address,
    Copies,
    CopyError,
    FoundCopy,
    TakenUp,
    checked,
    claim,
    find,
    name_of,
)
from dataflow.folder.ledger import HOME, Ledger
from dataflow.folder.ledger.copying import unpack
from dataflow.folder.retention import FACT
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits
from dataflow.system.child import die_with_parent, program
from dataflow.system.files import RunFolderError, disk, flush_to_disk, to_json

ANSWER_S = 20.0
"""For an address to take a file of a hundred bytes."""
STILL_S = Limits().copy_s
"""For the next bytes of a copy that is brought back."""
MOVES, MOVES_S = b"moves\n", 1.0
"""What the process says while bytes come, and how often at most."""
NOWHERE = ""
START_S = 30.0
"""For the process to begin."""
_ERRORS = {kind.__name__: kind for kind in (GraphError, RunFolderError, TakenUp)}


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
    before = msgspec.convert((config or {}).get(CONFIG) or None, Copies | None)
    address = None if checkpoint_to is None else checked(checkpoint_to)
    if before is not None and address in (None, before.address):
        ask("check", before.address, copies=asdict(before))
        return before
    if address is None:
        return None
    plain = ask("claim", address, run=folder.path.name, trainers=list(trainers), after=None)
    return msgspec.convert(plain, Copies)


def bring_back(
    text: str, runs: str | Path, told: Callable[[str], object] = lambda text: None
) -> RunFolder:
    """Make the run folder of a run whose copies are at an address, ready for a resume.

    text: of the run, or of a place with one run. runs: where the folder goes; it has the name that
    it had. Nobody else writes at the address for this run from then on. A crash on the way leaves
    no run folder. Errors: GraphError; RunError where there is no whole copy, or the folder is there
    already.
    """
    copy = FoundCopy(**ask("find", checked(text), within_s=3 * ANSWER_S))
    path = Path(runs).absolute() / copy.run
    if path.exists():
        raise RunError(
            f"'{path}' is there already, and may have more than the copies at '{text}'; go on with"
            f" it (dataflow resume {path}), or give another folder with --runs"
        )
    part = path.with_name(f".{copy.run}.bringing")
    with disk("making", part):
        shutil.rmtree(part, ignore_errors=True)
        for below in ("logs", "rollouts", "checkpoints"):
            (part / below).mkdir(parents=True)
    steps = {
        trainer: _bring_newest(copy, trainer, whole, part, told)
        for trainer, whole in copy.steps.items()
        if whole
    }
    _put_ledger(part, steps)
    copies = ask("claim", copy.place, run=copy.run, trainers=list(copy.steps), after=copy.newest)
    _note(part, steps, copies)
    with disk("making", path):
        flush_to_disk(part)
        part.rename(path)
        flush_to_disk(path.parent)
    folder = RunFolder.open(path)
    folder.make_latest()
    return folder


def bring_checkpoint(
    copies: Copies, trainer: str, folder: Path, above: int, upto: int, told: Callable[[str], object]
) -> int | None:
    """Put the newest undamaged copy of a trainer's checkpoint into the folder of its run, which has
    the ledger; its step. None where none of a step above `above`, and not above `upto`, is there.
    Errors: GraphError; RunError.
    """
    copy = FoundCopy(**ask("find", copies.place, within_s=3 * ANSWER_S))
    steps = [step for step in copy.steps.get(trainer, ()) if above < step <= upto]
    if not steps:
        return None
    step = _bring_newest(copy, trainer, steps, folder, told)
    _packed(folder, trainer).unlink()
    return step


def _bring_newest(
    found: FoundCopy,
    trainer: str,
    steps: Sequence[int],
    folder: Path,
    told: Callable[[str], object],
) -> int:
    """Bring the newest copy of a trainer that is undamaged; its step."""
    told(f"bringing the checkpoint of step {steps[-1]} from {found.place}")
    brought = ask(
        "bring",
        found.place,
        within_s=STILL_S,
        found=asdict(found),
        trainer=trainer,
        steps=list(steps),
        folder=str(folder),
    )
    for damage in brought["damaged"]:
        told(f"{damage}; taking the one before it")
    return int(brought["step"])


def _put_ledger(folder: Path, steps: Mapping[str, int]) -> None:
    """Of the ledgers that came with the checkpoints the latest, which knows the steps of all of
    them.
    """
    unpacked = {trainer: folder / f".ledger-{at}.db" for at, trainer in enumerate(steps)}
    moments = {
        trainer: unpack(_packed(folder, trainer), path) for trainer, path in unpacked.items()
    }
    latest = max(moments, key=lambda trainer: moments[trainer])
    unpacked[latest].rename(folder / "ledger.db")
    for leftover in (*folder.glob(".ledger-*"), *(_packed(folder, trainer) for trainer in steps)):
        leftover.unlink()


def _note(folder: Path, steps: Mapping[str, int], copies: Mapping[str, Any]) -> None:
    """What the ledger is to say of a folder that has no rollouts."""
    Ledger.prove(folder / "ledger.db")
    with Ledger.open(folder / "ledger.db") as ledger:
        facts = ledger.facts()
        gone = {}
        for node in (node["name"] for node in facts["graph"]["nodes"]):
            last = steps.get(node, steps.get("") if ledger.last_step(node) else None)
            if last is None:
                last = ledger.last_round(node)
            if last:
                gone[f"{FACT}/{node}"] = last
        config = {**facts["config"], CONFIG: copies}
        ledger.set_facts({**gone, "config": config})
        for trainer, step in steps.items():
            ledger.set_place(str(Path("checkpoints", trainer, name_of(step))), HOME)
        ledger.flush()
    for name, value in (("graph.json", facts["graph"]), ("config.json", config)):
        RunFolder(folder).write_json(name, value)


def _packed(folder: Path, trainer: str) -> Path:
    return folder / f".packed.{trainer or 'trainer'}"


# The process


def _check(text: str, copies: Mapping[str, Any]) -> None:
    msgspec.convert(copies, Copies).check(Address.of(text))


def _bring(
    text: str, found: Mapping[str, Any], trainer: str, steps: list[int], folder: str
) -> dict[str, Any]:
    """Of the steps the newest that is undamaged; what the damage of later ones is."""
    store, damaged = FoundCopy(**found).store(trainer), list[str]()
    said_at = time.monotonic()

    def moved(count: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > MOVES_S:
            said_at = time.monotonic()
            print(MOVES.decode(), end="", flush=True)

    for step in reversed(steps):
        into = Path(folder, "checkpoints", trainer, name_of(step))
        shutil.rmtree(into, ignore_errors=True)
        try:
            with disk("writing", into):
                store.get(step, into, moved)
        except CopyError as error:
            if not isinstance(error.__cause__, FileNotFoundError | None):
                raise  # the address or this disk fails now; the copy may be good
            damaged.append(str(error))
            shutil.rmtree(into, ignore_errors=True)
            continue
        marker = store.marker(step)
        (into / LEDGER).rename(_packed(Path(folder), trainer))
        marker["files"].pop(LEDGER)
        (into / MARKER).write_text(to_json(marker, indent=1))
        flush_to_disk(into)
        return {"step": step, "damaged": damaged}
    raise RunError(
        f"no checkpoint at '{store.place.text}' is whole: {damaged[-1]}; look at what stands there"
    )


TASKS: Mapping[str, Callable[..., Any]] = {
    "bring": _bring,
    "check": _check,
    "claim": lambda text, **given: asdict(claim(Address.of(text), text, **given)),
    "find": lambda text: asdict(find(text)),
}
"""Each of an address and plain values, and so is what it returns."""


def ask(task: str, address: str, *, within_s: float | None = None, **given: Any) -> Any:
    """What one of `TASKS` returns, from a process that is killed when it says nothing for so long,
    not even that bytes come. within_s: None: `ANSWER_S`.

    Errors: what it raises, as GraphError, TakenUp or RunError; GraphError where the address hangs
    or takes nothing.
    """
    within_s = ANSWER_S if within_s is None else within_s
    reads, writes = os.pipe()
    try:
        child = program(
            "dataflow.folder.copies.process",
            task,
            json.dumps({"text": address, **given}),
            stdin=subprocess.DEVNULL,
            stdout=writes,
        )
    finally:
        os.close(writes)
    try:
        line = _line(reads, START_S) and _line(reads, within_s)
        while line == MOVES:
            line = _line(reads, within_s)
    finally:
        os.close(reads)
        child.end(0.0)  # one that hangs in the kernel is left to it
    if not line:
        raise GraphError(
            f"checkpoints cannot go to '{address}', nor come from there: it did not answer within"
            f" {within_s:.0f} s; look whether it is reached from here, or give another"
            " address"
        )
    answer = json.loads(line)
    if "error" not in answer:
        return answer["value"]
    if answer["error"] == "CopyError":
        raise GraphError(
            f"checkpoints cannot go to '{address}', nor come from there: {answer['text']}; look"
            " whether it is reached from here and may be written, or give another address"
        )
    raise _ERRORS.get(answer["error"], RunError)(answer["text"])


def _line(pipe: int, within_s: float) -> bytes:
    """A line of a pipe, and nothing after it; empty where none came, or the other end was
    closed.
    """
    deadline, line = time.monotonic() + within_s, b""
    while not line.endswith(b"\n"):
        wait_s = max(0.0, deadline - time.monotonic())
        if not select.select([pipe], [], [], wait_s)[0] or not (byte := os.read(pipe, 1)):
            return b""
        line += byte
    return line


def main() -> None:
    """Do a task: say that it has begun, and then what came of it. The process ends at once when
    that is done, whatever threads a file system's client has.
    """
    die_with_parent()
    print("begun", flush=True)
    answer: dict[str, Any]
    try:
        answer = {"value": TASKS[sys.argv[1]](**json.loads(sys.argv[2]))}
    except DataflowError as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
