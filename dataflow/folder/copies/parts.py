"""Who may write at a run's address: each process that takes the run up there has a part of its own,
with a number.

Two that cannot see each other cannot spoil each other's copies so, and who finds a part above its
own was replaced.
"""

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dataflow.errors import GraphError, RunError
from dataflow.folder.copies.address import Address, CopyError, joined

CONFIG = "checkpoint_to"
"""In what the ledger says of a run."""
_PART = "part-{:06d}"
_CLAIM = "claim-"


class TakenUp(RunError):
    """A run was taken up from its address by another process, which has it from then on."""


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Where copies of a run's checkpoints go; plain values."""

    address: str
    """As the user gave it; the run has a folder there, of its own folder's name."""
    run: str
    part: int
    token: str
    """Of the claim on that part."""
    trainers: Sequence[str]
    """Folders of those that keep checkpoints; empty for a run's only one."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any] | None) -> "Copies | None":
        """What JSON or msgpack has made of one; None of none."""
        return cls(**{**plain, "trainers": tuple(plain["trainers"])}) if plain else None

    def to_plain(self) -> dict[str, Any]:
        """For JSON and msgpack."""
        return asdict(self)

    @property
    def place(self) -> str:
        """The run's own address, for people: what `dataflow resume --from` takes."""
        return joined(self.address, self.run)

    def at(self, address: Address) -> Address:
        """Its part there."""
        return address.below(self.run).below(part_name(self.part))

    def check(self, address: Address) -> None:
        """Errors: TakenUp where the run was taken up from its address since; CopyError."""
        run = address.below(self.run)
        for part in parts(run):
            if part > self.part and (found := claims(run, part)):
                raise replaced(self, part, list(found.values()))


def part_name(number: int) -> str:
    """Of its folder."""
    return _PART.format(number)


def newest_part(run: Address) -> int:
    """Number of the newest part; 0: there is none. Errors: CopyError."""
    return max(parts(run), default=0)


def parts(run: Address) -> list[int]:
    """Numbers of all parts, ascending. Errors: CopyError."""
    found = (name.removeprefix("part-") for name in run.names() if name.startswith("part-"))
    return sorted(int(number) for number in found if number.isdecimal())


def claims(run: Address, part: int) -> dict[str, Mapping[str, Any]]:
    """By token, who wants a part. Errors: CopyError."""
    place = run.below(part_name(part))
    return {token: place.get_json(_claim_name(token)) for token in _tokens(run, part)}


def claim(
    address: Address, text: str, run: str, trainers: Sequence[str], after: int | None
) -> Copies:
    """Have the next part of a run for this process. after: the last part that is known; None: the
    run is new.

    Of several that claim one at a time none has it, or one: each writes its claim, and then looks
    for others. Errors: GraphError, RunError where it belongs to somebody else; CopyError.
    """
    place = address.below(run)
    newest = newest_part(place)
    if after is None and newest:
        raise GraphError(
            f"'{place.text}' has checkpoints of a run of this name; give the address as that run"
            " knows it, or another one"
        )
    if after is not None and newest > after:
        raise RunError(
            f"'{place.text}' was taken up by another process at this moment; leave the run to it"
        )
    made = Copies(
        address=text, run=run, part=newest + 1, token=secrets.token_hex(8), trainers=tuple(trainers)
    )
    mine = f"{part_name(made.part)}/{_claim_name(made.token)}"
    who = {"host": socket.gethostname(), "process": os.getpid(), "trainers": list(trainers)}
    try:
        place.put_json(mine, who)
        others = _tokens(place, made.part) - {made.token}
    except CopyError:
        with contextlib.suppress(CopyError):
            place.remove(mine)
        raise
    if others:
        place.remove(mine)
        raise RunError(
            f"'{place.text}' is being taken up by {len(others) + 1} processes at once, so that none"
            " of them has it; try again with one"
        )
    return made


def _tokens(run: Address, part: int) -> set[str]:
    names = run.below(part_name(part)).names()
    return {
        name.removeprefix(_CLAIM).removesuffix(".json") for name in names if name.startswith(_CLAIM)
    }


def _claim_name(token: str) -> str:
    return f"{_CLAIM}{token}.json"


def replaced(copies: Copies, part: int, found: Sequence[Mapping[str, Any]]) -> TakenUp:
    """That a run goes on elsewhere, as another part. found: who claimed that."""
    return TakenUp(
        f"'{copies.run}' was taken up from '{copies.place}' by process {found[0].get('process')} on"
        f" host '{found[0].get('host')}', as part {part} where this one is part {copies.part};"
        " leave it to that one, or start a new run"
    )
