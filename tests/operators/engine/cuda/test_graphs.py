"""Steps that are replayed draw what steps as they are draw; which bucket serves how many rows."""

import numpy as np
import pytest
import torch

from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.engine.attention import AttentionLayout, KVCache
from operators.engine.cuda.graphs import (
    GraphedDecode,
    GraphReplays,
    Repeats,
    bucket_of,
    buckets,
    lengths,
)
from operators.engine.interface import Row
from operators.engine.pages import AHEAD, Prefix
from operators.engine.rows import Rows
from operators.engine.sampler import Draw, Sampling, kind_of, knob_columns

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


def test_lengths_double_up_to_the_context_in_whole_pages():
    assert lengths(100) == (112,) and lengths(1023) == (1024,) and lengths(1024) == (1040,)
    assert lengths(5000) == (1024, 2048, 4096, 5008)
    assert [bucket_of(count, lengths(5000)) for count in (1, 1024, 1025, 5001)] == [
        1024,
        1024,
        2048,
        5008,
    ]


class Tape:
    """A recorder that says what it was asked for; a key whose work fails cannot be recorded."""

    def __init__(self):
        self.asked = []

    def aside(self, work):
        self.asked.append(("aside", *work.args))
        work()

    def record(self, work):
        self.asked.append(("record", *work.args))
        if work.args[0] == "waits":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

        def replay():
            self.asked.append(("replay", *work.args))
            work()

        return replay


def test_work_is_done_aside_then_recorded_then_replayed_once_for_each_call_with_its_key():
    seen, tape = [], Tape()
    replays = GraphReplays(lambda *key: seen.append(key), tape)
    replays.capture(8, "b")
    for key in ((4, "a"), (4, "a"), (8, "b"), (4, "a")):
        replays(*key)
    assert seen == [(8, "b"), (4, "a"), (4, "a"), (8, "b"), (4, "a")]
    assert [how for how, size, _ in tape.asked if size == 4] == [
        "aside",
        "record",
        "replay",
        "replay",
    ]
    assert (replays.calls, replays.replayed, replays.captured) == (4, 2, 2)
    replays.forget()
    replays(8, "b")
    assert tape.asked[-2:] == [("record", 8, "b"), ("replay", 8, "b")]
    assert (replays.calls, replays.replayed, replays.captured) == (5, 2, 1)


def test_work_that_cannot_be_recorded_is_done_aside_from_then_on_and_the_user_is_told():
    seen, tape = [], Tape()
    replays = GraphReplays(lambda *key: seen.append(key), tape)
    with pytest.warns(RuntimeWarning, match="not permitted"):
        for key in (("waits",), ("waits",), ("waits",), ("else",), ("else",)):
            replays(*key)
    assert seen == [("waits",)] * 3 + [("else",)] * 2
    assert replays.refused == "operation not permitted when stream is capturing"
    assert replays.replayed == replays.captured == 0
    assert [how for how, _ in tape.asked].count("record") == 1


def rows_of(live, slots, *, context_tokens=40):
    """Live rows of a few tokens, each in pages of its own."""
    rows = Rows(slots, context_tokens, CPU, ahead=AHEAD)
    rng = np.random.default_rng(0)
    given = [
        Row(
            ticket=i,
            age=i,
            tokens=RolloutTokens.given(rng.integers(2, 50, 3 + 5 * i)),
            start=3 + 5 * i,
            limit=40,
            seed=100 + i,
            sampling=Sampling(temperature=0.5 * i, top_p=1 - i / 10),
            stop=None,
        )
        for i in range(live)
    ]
    rows.add(given, [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(live)])
    return rows


def decode_of(rows, cache, forward, drawing, recorder):
    return GraphedDecode(
        forward,
        drawing,
        rows,
        cache,
        None,
        context_tokens=40,
        vocabulary=2,
        recorder=recorder,
    )


def test_rows_that_fill_the_bucket_write_to_the_scratch_page_and_are_not_returned():
    rows, cache, seen = rows_of(5, 30), KVCache(90), []

    def forward(tokens, positions, kept, layout):
        assert isinstance(layout, AttentionLayout) and layout.cache is cache
        assert layout.longest == 48 and layout.new is None and not layout.together and kept == 0
        seen.append((tokens.clone(), positions.clone(), layout.table.clone()))
        return torch.stack([tokens, positions], 1).float()

    def drawing(logits, sampling, seeds, counts):
        assert sampling.temperature[:5, 0].tolist() == [1.0, 0.5, 1.0, 1.5, 2.0]
        assert sampling.greedy[:5, 0].tolist() == [True, False, False, False, False]
        return Draw(logits[:, 0].long() + seeds + counts, logits[:, 1], None)

    decode = decode_of(rows, cache, forward, drawing, Repeats())
    tokens, logprobs = decode.drawn(rows.kind)
    assert torch.equal(tokens, rows.last + rows.draws()[0] + rows.draws()[1])
    assert torch.equal(logprobs, rows.positions.float())
    ((given, positions, table),) = seen
    assert len(given) == 8
    assert (
        (given[5:] == 0).all()
        and (positions[5:] == 0).all()
        and (table[5:, 0] == cache.scratch).all()
    )
    assert torch.equal(table[:5], rows.table)


def test_new_tokens_stand_as_rows_behind_the_live_ones_and_only_wanted_logits_are_kept():
    rows, cache, seen = rows_of(3, 9), KVCache(90), []
    fresh = [
        Prefix(tokens=np.arange(20, 40), cached=1, tables=[[30, 31]]),
        Prefix(tokens=np.arange(50, 53), cached=0, tables=[[32], [33]]),
    ]

    def forward(tokens, positions, kept, layout):
        assert layout.together and len(tokens) == 16
        seen.append((tokens[:10].tolist(), positions[:10].tolist(), layout.table[:10, :2].tolist()))
        return torch.stack([tokens[kept], positions[kept]], 1).float()

    decode = decode_of(rows, cache, forward, None, Repeats())
    count = rows.lay_ahead(fresh)
    logits = decode.logits(count, np.array([0, 1, 2, 6, 9]), 20)
    tokens, positions, table = seen[0]
    assert count == 10 and tokens[3:] == [36, 37, 38, 39, 50, 51, 52]
    assert positions[3:] == [16, 17, 18, 19, 0, 1, 2]
    assert table[3:] == [[30, 31]] * 4 + [[32, 0]] * 3
    assert logits[:, 1].tolist() == [*rows.positions.tolist(), 19, 2]
    assert logits[3:, 0].tolist() == [39, 52]


def test_steps_are_captured_before_the_run_as_long_as_there_is_time():
    tape, rows = Tape(), Rows(9, 40, CPU, ahead=AHEAD)

    def forward(tokens, positions, kept, layout):
        return torch.zeros(len(tokens) if isinstance(kept, int) else len(kept), 2)

    def drawing(logits, *_):
        return Draw(torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits)), None)

    decode = decode_of(rows, KVCache(27), forward, drawing, tape)
    left = iter([True] * 7)
    decode.capture(kind_of(knob_columns([Sampling()])), lambda: next(left, False))
    assert [size for how, size, *_ in tape.asked if how == "record"] == [
        *reversed(buckets(9)),
        *list(reversed(buckets(9 + AHEAD)))[:2],
    ]
    decode.capture(None, lambda: True)
    assert decode.replays.captured == len(buckets(9)) + len(buckets(9 + AHEAD))
