"""A run folder out of the copies at an address: checkpoints, the ledger that goes with them, in a
part of its own.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.errors import RunError
from dataflow.folder.checkpoints import MARKER
from dataflow.folder.copies.address import Address, CopyError, checked
from dataflow.folder.copies.finding import FoundCopy
from dataflow.folder.copies.parts import CONFIG, Copies, part_name
from dataflow.folder.copies.store import LEDGER, Store, name_of
from dataflow.folder.copies.taking import ANSWER_S, ask
from dataflow.folder.ledger import Ledger
from dataflow.folder.ledger.copying import unpack
from dataflow.folder.ledger.places import HOME
from dataflow.folder.ledger.upkeep import SetPlace
from dataflow.folder.retention import FACT
from dataflow.folder.run_folder import RunFolder
from dataflow.system.files import disk, flush_to_disk, to_json


def bring_back(
    text: str, runs: str | Path, told: Callable[[str], object] = lambda text: None
) -> RunFolder:
    """Make the run folder of a run whose copies are at an address, ready for a resume.

    text: of the run, or of a place with one run. runs: where the folder goes; it has the name that
    it had. Nobody else writes at the address for this run from then on. A crash on the way leaves
    no run folder. Errors: GraphError; RunError where there is no whole copy, or the folder is there
    already.
    """
    found = FoundCopy(**ask("find", checked(text), 3 * ANSWER_S, text=checked(text)))
    place, run = Address.of(found.place), found.run
    path = Path(runs).absolute() / run
    if path.exists():
        raise RunError(
            f"'{path}' is there already, and may have more than the copies at '{text}'; go on with"
            f" it (dataflow resume {path}), or give another folder with --runs"
        )
    part = place.below(run).below(part_name(found.part))
    making = path.with_name(f".{run}.bringing")
    with disk("making", making):
        shutil.rmtree(making, ignore_errors=True)
        for below in ("logs", "rollouts", "checkpoints"):
            (making / below).mkdir(parents=True)
    steps = {
        trainer: _bring_newest(Store(part, trainer), of, making, told)
        for trainer, of in found.steps.items()
        if of
    }
    _put_ledger(making, steps)
    taken = ask(
        "claim",
        place.text,
        text=place.text,
        run=run,
        trainers=list(found.steps),
        after=found.newest,
    )
    _note(making, steps, taken)
    with disk("making", path):
        flush_to_disk(making)
        making.rename(path)
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
    found = FoundCopy(**ask("find", copies.place, 3 * ANSWER_S, text=copies.place))
    steps = [step for step in found.steps.get(trainer, ()) if above < step <= upto]
    if not steps:
        return None
    part = Address.of(found.place).below(found.run).below(part_name(found.part))
    step = _bring_newest(Store(part, trainer), steps, folder, told)
    (folder / _packed(trainer)).unlink()
    return step


def _bring_newest(
    store: Store, steps: Sequence[int], making: Path, told: Callable[[str], object]
) -> int:
    """Bring the newest copy of a trainer that is undamaged; its step."""
    why = ""
    for step in reversed(steps):
        told(f"bringing the checkpoint of step {step} from {store.place.text}")
        into = making / "checkpoints" / store.trainer / name_of(step)
        shutil.rmtree(into, ignore_errors=True)
        try:
            store.get(step, into, lambda count: None)
        except CopyError as error:
            why = str(error)
            told(f"{why}; taking the one before it")
            shutil.rmtree(into, ignore_errors=True)
            continue
        marker = store.marker(step)
        packed = into / LEDGER
        packed.rename(making / _packed(store.trainer))
        marker["files"].pop(LEDGER)
        (into / MARKER).write_text(to_json(marker, indent=1))
        flush_to_disk(into)
        return step
    raise RunError(
        f"no checkpoint at '{store.place.text}' is whole: {why}; look at what stands there"
    )


def _put_ledger(making: Path, steps: Mapping[str, int]) -> None:
    """Of the ledgers that came with the checkpoints the latest, which knows the steps of all of
    them.
    """
    made: dict[str, int] = {}
    for trainer in steps:
        made[trainer] = unpack(making / _packed(trainer), making / f"{_packed(trainer)}.db")
        (making / _packed(trainer)).unlink()
    latest = max(made, key=lambda trainer: made[trainer])
    (making / f"{_packed(latest)}.db").rename(making / "ledger.db")
    for trainer in steps:
        for rest in making.glob(f"{_packed(trainer)}.db*"):
            rest.unlink()


def _note(making: Path, steps: Mapping[str, int], taken: Mapping[str, Any]) -> None:
    """What the ledger is to say of a folder that has no rollouts."""
    Ledger.prove(making / "ledger.db")
    with Ledger.open(making / "ledger.db") as ledger:
        facts = ledger.facts()
        nodes = [node["name"] for node in facts["graph"]["nodes"]]
        gone = {}
        for node in nodes:
            last = steps.get(node, steps.get("") if ledger.last_step(node) else None)
            if last is None:
                last = ledger.last_round(node)
            if last:
                gone[f"{FACT}/{node}"] = last
        config = {**facts["config"], CONFIG: taken}
        ledger.set_facts({**gone, "config": config})
        for trainer, step in steps.items():
            ledger.do(SetPlace(str(Path("checkpoints", trainer, name_of(step))), HOME))
        ledger.flush()
    for name, said in (("graph.json", facts["graph"]), ("config.json", config)):
        RunFolder(making).write_json(name, said)


def _packed(trainer: str) -> str:
    return f".ledger.{trainer or 'trainer'}"
