"""The load of the data-plane bench: rollouts as flat arrays, the same for every system.

Axis suffixes: R rollouts, T tokens of all rollouts, one after the other.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

CHARACTERS_PER_TOKEN = 4

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What a generator holds when a batch of rollouts is finished."""

    arrays: Arrays
    """Per rollout: offsets (R + 1), rollout_id, position, reward. Per token: tokens, mask,
    logprobs, versions, and text (four characters for each)."""

    @property
    def rows(self) -> int:
        """Number of rollouts."""
        return len(self.arrays["rollout_id"])


def make(rows: int, tokens: int) -> Rollouts:
    """`rows` rollouts of about `tokens` tokens."""
    random = np.random.default_rng(0)
    lengths_R = random.integers(tokens * 9 // 10, tokens * 11 // 10 + 1, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths_R)]).astype(np.int32)
    total = int(offsets[-1])
    return Rollouts(
        arrays={
            "offsets": offsets,
            "rollout_id": np.arange(rows, dtype=np.int64),
            "position": np.arange(rows, dtype=np.int32),
            "reward": random.random(rows),
            "tokens": random.integers(0, 32_000, total, dtype=np.int32),
            "mask": random.random(total) < 0.9,
            "logprobs": -random.random(total, dtype=np.float32),
            "versions": np.full(total, 3, np.int32),
            "text": random.integers(97, 123, total * CHARACTERS_PER_TOKEN, dtype=np.uint8),
        }
    )


def to_batch(rollouts: Rollouts, issued_ns: int) -> pa.RecordBatch:
    """A record batch over the flat arrays; only the mask is copied, to bits (packbits: 8 times
    pa.array).
    """
    arrays = rollouts.arrays
    offsets = pa.array(arrays["offsets"])
    bits = pa.py_buffer(np.packbits(arrays["mask"], bitorder="little"))
    mask = pa.BooleanArray.from_buffers(pa.bool_(), len(arrays["mask"]), [None, bits])

    def ragged(values: pa.Array) -> pa.ListArray:
        return pa.ListArray.from_arrays(offsets, values)

    text_offsets = pa.py_buffer(arrays["offsets"] * CHARACTERS_PER_TOKEN)
    columns = {
        "issued_ns": pa.array(np.full(rollouts.rows, issued_ns)),
        "rollout_id": pa.array(arrays["rollout_id"]),
        "position": pa.array(arrays["position"]),
        "completion": pa.StringArray.from_buffers(
            rollouts.rows, text_offsets, pa.py_buffer(arrays["text"])
        ),
        "tokens": ragged(pa.array(arrays["tokens"])),
        "mask": ragged(mask),
        "logprobs": ragged(pa.array(arrays["logprobs"])),
        "versions": ragged(pa.array(arrays["versions"])),
        "reward": pa.array(arrays["reward"]),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def from_batch(batch: pa.RecordBatch) -> tuple[Arrays, int]:
    """The flat arrays of a record batch, and when it was issued."""
    text = batch["completion"].buffers()[2]
    mask = batch["mask"].values
    arrays: Arrays = {
        name: batch[name].values.to_numpy() for name in ("tokens", "logprobs", "versions")
    }
    bits = np.frombuffer(mask.buffers()[1], np.uint8)
    arrays["mask"] = np.unpackbits(bits, count=len(mask), bitorder="little").view(np.bool_)
    arrays |= {name: batch[name].to_numpy() for name in ("rollout_id", "position", "reward")}
    arrays["offsets"] = batch["tokens"].offsets.to_numpy()
    arrays["text"] = np.frombuffer(text, np.uint8)
    return arrays, int(batch["issued_ns"][0].as_py())


def read(arrays: Arrays) -> float:
    """Touch every value, as a trainer would."""
    return float(sum(array.max() for array in arrays.values()))
