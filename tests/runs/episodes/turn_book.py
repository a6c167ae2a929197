"""What a generator was asked for and drew, turn by turn, in a file that outlives it; and what a run
made of it.
"""

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from rigs.operators import Around, wrapped

from dataflow.node import Operator
from dataflow.records import GROUP_ID, LOGPROBS, OF_GROUP, OF_SOURCE, SEED, TOKENS, VERSIONS
from dataflow.runtime import Batch, Runtime

Drawn = tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]


"""Ids, log-probabilities (float32) and versions of a turn."""


class _Booked(Around):
    """Writes down the turns that are asked for and those that leave, each in one write."""

    def __init__(self, inner: Runtime, episode: str, path: Path) -> None:
        super().__init__(inner)
        self._episode = episode
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def push(self, batch: Batch) -> None:
        if batch.source == self._episode:
            names = {"number": GROUP_ID, "seed": SEED, "source": OF_SOURCE, "group": OF_GROUP}
            self._write(batch.records, names)
        super().push(batch)

    def work(self) -> list[Batch] | None:
        made = super().work()
        for batch in made or ():
            if batch.source == self._episode:
                names = {
                    "drawn": GROUP_ID,
                    "ids": TOKENS,
                    "logprobs": LOGPROBS,
                    "versions": VERSIONS,
                }
                self._write(batch.records, names)
        return made

    def _write(self, records: pa.RecordBatch, names: Mapping[str, str]) -> None:
        columns = [records.column(name).to_pylist() for name in names.values()]
        for row in zip(*columns, strict=True):
            os.write(self._file, f"{json.dumps(dict(zip(names, row, strict=True)))}\n".encode())


class TurnBook:
    """The file, and what stands in it."""

    def __init__(self, path: Path, episode: str) -> None:
        self._path, self._episode = path, episode

    def kept_by(self, generator: Operator) -> Operator:
        """The generator, which writes in it."""
        return wrapped(generator, lambda inner: _Booked(inner, self._episode, self._path))

    def drawn_again(self, rollouts: pa.Table, *, seed: int, source: str) -> int:
        """How many turns of trained rollouts the generator drew more than once, each time counted.
        Asserts that each turn of each rollout is one that it drew, whole, of this very turn of this
        very rollout.

        seed: of the run. rollouts: of one conversation each.
        """
        numbers, drawn = self._read()
        again = 0
        for row in rollouts.to_pylist():
            turns = np.array(row["turn"])
            for turn in range(int(turns.max()) + 1):
                key = f"{seed}/{source}/{row['group_id']}/{row['position']}/{turn}"
                asked = numbers[
                    xxhash.xxh3_64_intdigest(key.encode()) - (1 << 63), source, row["group_id"]
                ]
                found = [each for number in asked for each in drawn[number]]
                assert _turn(row, np.flatnonzero(turns == turn)) in found, (
                    f"nobody drew turn {turn} of {key}"
                )
                again += len(found) - 1
        return again

    def _read(self) -> tuple[dict[tuple[int, str, int], set[int]], dict[int, list[Drawn]]]:
        """Requests by seed, source and group; and by request what was drawn."""
        numbers: dict[tuple[int, str, int], set[int]] = defaultdict(set)
        drawn: dict[int, list[Drawn]] = defaultdict(list)
        for line in self._path.read_text().splitlines():
            row: dict[str, Any] = json.loads(line)
            if "number" in row:
                numbers[row["seed"], row["source"], row["group"]].add(row["number"])
            elif row["ids"]:
                drawn[row["drawn"]].append(
                    (tuple(row["ids"]), tuple(row["logprobs"]), tuple(row["versions"]))
                )
        return numbers, drawn


def _turn(row: Mapping[str, Any], at: Any) -> Drawn:
    return tuple(tuple(row[name][index] for index in at) for name in (TOKENS, LOGPROBS, VERSIONS))  # type: ignore[return-value]
