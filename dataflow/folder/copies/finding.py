"""What stands at an address that a run could go on from."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dataflow.errors import RunError
from dataflow.folder.copies.address import Address
from dataflow.folder.copies.parts import claims, newest_part, part_name, parts
from dataflow.folder.copies.store import Store


@dataclass(frozen=True, kw_only=True)
class FoundCopy:
    """What a run can go on from."""

    place: str
    """Address of the folder that holds it."""
    run: str
    part: int
    newest: int
    """Part: of all that were claimed."""
    steps: Mapping[str, Sequence[int]]
    """By folder of a trainer, its copies that are whole, as far as markers tell, ascending."""

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def choose(whole: Mapping[int, Mapping[str, Sequence[int]]]) -> int:
    """The part to go on from: the newest from which every trainer can, else the newest with any
    copy; 0: there is none.

    whole: by part, by trainer, the steps that are there.
    """
    for is_enough in (all, any):
        for part in sorted(whole, reverse=True):
            if whole[part] and is_enough(map(bool, whole[part].values())):
                return part
    return 0


def find(text: str) -> FoundCopy:
    """text: address of a run, or of a place with one run. Errors: GraphError; RunError where there
    is no whole copy, or several runs are; CopyError.
    """
    place, name = _run_at(Address.of(text))
    run = place.below(name)
    whole: dict[int, dict[str, list[int]]] = {}
    for part in parts(run):
        trainers = [
            trainer for each in claims(run, part).values() for trainer in each.get("trainers", [])
        ]
        whole[part] = {
            trainer: Store(run.below(part_name(part)), trainer).whole() for trainer in trainers
        }
    chosen, newest = choose(whole), max(whole, default=0)
    if not chosen:
        raise RunError(
            f"there is no whole checkpoint at '{run.text}', but {newest or 'no'} parts; give the"
            " address that the run printed, or start a new run"
        )
    return FoundCopy(place=place.text, run=name, part=chosen, newest=newest, steps=whole[chosen])


def _run_at(address: Address) -> tuple[Address, str]:
    """The place that holds runs, and the name of the one that is meant."""
    if parts(address):
        return address.parent, address.name
    runs = [name for name in address.names() if newest_part(address.below(name))]
    if len(runs) > 1:
        raise RunError(
            f"'{address.text}' holds {len(runs)} runs: {', '.join(runs[-8:])}; give the address of"
            f" one, as in {address.below(runs[-1]).text}"
        )
    return (address, runs[0]) if runs else (address.parent, address.name)
