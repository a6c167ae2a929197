"""Steps that are replayed draw what steps as they are draw; which bucket serves how many rows."""

import numpy as np
import pytest
import torch

from operators.engine.attention import AttentionLayout, KVCache
from operators.engine.cuda.graphs import GraphedDecode, GraphReplays, bucket_of, buckets
from operators.engine.sampler import Draw, Sampling

CPU = torch.device("cpu")


@pytest.mark.parametrize("slots", [1, 3, 8, 30, 64, 100, 256, 1000, 4096])
def test_buckets_rise_to_exactly_the_slots_and_waste_little(slots):
    sizes = buckets(slots)
    assert sizes[-1] == slots and list(sizes) == sorted(set(sizes))
    for rows in range(1, slots + 1):
        size = bucket_of(rows, sizes)
        assert rows <= size <= max(rows + 7, rows * 1.25)
        assert all(smaller < rows for smaller in sizes if smaller < size)
    assert len(sizes) <= 40


def test_the_first_buckets_are_small():
    assert buckets(256) == (
        1,
        2,
        4,
        8,
        16,
        24,
        32,
        40,
        48,
        56,
        64,
        80,
        96,
        112,
        128,
        160,
        192,
        224,
        256,
    )


def test_on_the_cpu_work_is_done_once_for_each_call_with_its_key():
    seen = []
    replays = GraphReplays(lambda *key: seen.append(key), CPU)
    for key in ((4, "a"), (4, "a"), (8, "b")):
        replays(*key)
    replays.forget()
    assert seen == [(4, "a"), (4, "a"), (8, "b")]
    assert replays.captured == 0 and replays.refused is None


class Rows:
    """Live rows in front, rubbish behind."""

    def __init__(self, live, slots):
        self.n = live
        rng = np.random.default_rng(0)
        self.last = torch.from_numpy(rng.integers(0, 50, slots))
        self.at = torch.from_numpy(rng.integers(0, 40, slots))
        self.table = torch.full((slots, 3), 999, dtype=torch.int32)
        self.table[:live] = torch.arange(live * 3).view(live, 3)

    def front(self, count):
        return (
            self.last[:count],
            self.at[:count],
            self.table[:count],
            self.last[:count] * 3,
            self.at[:count],
        )

    def fill(self, count, page):
        self.table[self.n : count] = page
        self.at[self.n : count] = 0
        self.last[self.n : count] = 0


def test_rows_that_fill_the_bucket_write_to_the_scratch_page_and_are_not_returned():
    rows, cache, seen = Rows(5, 30), KVCache(90), []

    def forward(tokens, positions, layout):
        assert isinstance(layout, AttentionLayout) and layout.cache is cache
        assert layout.longest == 48 and layout.new is None
        seen.append((tokens.clone(), positions.clone(), layout.table.clone()))
        return torch.stack([tokens, positions], 1).float()

    def drawing(logits, sampling, seeds, counts):
        assert sampling.temperature == 0.5
        return Draw(logits[:, 0].long() + seeds + counts, logits[:, 1], None)

    decode = GraphedDecode(forward, drawing, rows, cache, None, slots=30, device=CPU)
    tokens, logprobs = decode(5, Sampling(temperature=0.5))
    assert torch.equal(tokens, rows.last[:5] * 4 + rows.at[:5]) and torch.equal(
        logprobs, rows.at[:5].float()
    )
    ((given, positions, table),) = seen
    assert len(given) == 8
    assert (
        (given[5:] == 0).all() and (positions[5:] == 0).all() and (table[5:] == cache.scratch).all()
    )
    assert torch.equal(table[:5], rows.table[:5])
