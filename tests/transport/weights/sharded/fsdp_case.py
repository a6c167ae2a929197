"""One run of an FSDP2 trainer and its tensor-parallel generators: what the test and the ranks both
know of it.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

CASE_S, EXCHANGE_S = 80.0, 30.0
"""For a whole case, and for one exchange between ranks of one side."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trainer and its generators."""

    folder: str
    """Closed to other users, and empty."""
    trainer: int
    """Ranks over which FSDP2 shards."""
    groups: tuple[int, ...]
    """Ranks of each generator."""
    heads: int
    """The hidden size is 3 for each, so that few numbers of ranks divide it."""
    layers: int = 1
    dtype: str = "float32"
    """Of the generators; the trainer's parameters are float32."""
    cast: str = "way"
    """Where to the generators' dtype: on the way, or by the trainer as it makes its snapshot."""
    hold: str = "snapshot"
    tied: bool = False
    in_turn: int = 20
    """Versions published once every generator has the one before."""
    in_a_row: int = 5
    """Versions published after these, one by each step."""
    rests: bool = False
    """Whether the generators adopt none of the versions in a row before the trainer has published
    its last."""

    @property
    def address(self) -> str:
        """Where both sides meet."""
        return f"ipc://{self.folder}/w.sock"

    @property
    def last(self) -> int:
        """The version that ends the run."""
        return self.in_turn + self.in_a_row

    def ranks(self) -> Iterator[tuple[str, int, int]]:
        """Side, number and rank of each process; the trainer is number 0."""
        yield from (("trainer", 0, rank) for rank in range(self.trainer))
        yield from (
            ("generator", number, rank)
            for number, size in enumerate(self.groups)
            for rank in range(size)
        )

    def meeting(self, side: str, number: int) -> Path:
        """Folder in which the ranks of one side meet each other."""
        return Path(self.folder) / "meet" / f"{side}-{number}"

    def oracle(self, version: int) -> Path:
        """Where the trainer leaves the full tensors of a version, before it publishes it."""
        return Path(self.folder) / f"{version}.safetensors"

    def result(self, side: str, number: int, rank: int) -> Path:
        """What a process has seen, as JSON, once it has ended well."""
        return Path(self.folder) / f"{side}-{number}-{rank}.json"

    def log(self, side: str, number: int, rank: int) -> Path:
        """What a process has printed."""
        return self.result(side, number, rank).with_suffix(".log")


def line_of(case: Case) -> str:
    """The case as a line of JSON."""
    return json.dumps(asdict(case)) + "\n"


def case_of(line: str) -> Case:
    """The case again."""
    fields = json.loads(line)
    return Case(**{**fields, "groups": tuple(fields["groups"])})
