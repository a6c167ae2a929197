"""How a step is dealt out to ranks: all of it, once, alike in number, and of like size; and how
rows travel.
"""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples
from trainer_rig import group, rows_of

from dataflow.tokens.rollout_tokens import RolloutTokens, SamplingMask
from operators.training.learner.learner import Prepared
from operators.training.learner.rows import pack
from operators.training.parallel.lead import (
    CODEC,
    CallFunction,
    DealtRollouts,
    Share,
    ShareAlike,
    addressed,
    chosen,
    cost,
    deal,
    dealt,
    fill,
    function_of,
    in_order,
    pieces,
    spread,
    units,
)

GROUPS = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(1, 30), min_size=1, max_size=6)), max_size=12
)


"""By group: tokens of its common prompt, and of each completion."""


def step(groups):
    """Tokens, offsets and group of each rollout."""
    rows, numbers = [], []
    for number, (common, completions) in enumerate(groups):
        for position, length in enumerate(completions):
            rows.append([1] * common + [2 + position] * length)
            numbers.append(7 * number)
    offsets = np.r_[0, np.cumsum([len(row) for row in rows])].astype(np.int64)
    return (
        np.array([token for row in rows for token in row], np.int32),
        offsets,
        np.array(numbers, np.int64),
    )


def costs_of(tokens, offsets, parts):
    """What goes through the model for each micro-batch, were the last token of a rollout to."""
    found = []
    for part in parts:
        rows = [tokens[offsets[row] : offsets[row + 1]].tolist() for row in part]
        flat = np.array([token for row in rows for token in [*row, 0]], np.int32)
        ends = np.r_[0, np.cumsum([len(row) + 1 for row in rows])].astype(np.int64)
        found.append(pack(flat, np.ones(len(flat), bool), ends).nodes if len(part) else 0)
    return found


@examples(200)
@given(GROUPS, st.integers(1, 5), st.integers(1, 120), st.booleans())
def test_every_rollout_is_in_exactly_one_micro_batch_and_ranks_have_as_many(
    groups, ranks, limit, whole
):
    tokens, offsets, numbers = step(groups)
    shares = deal(tokens, offsets, numbers, ranks, limit, whole=whole)
    assert len(shares) == ranks
    assert len({len(parts) for parts in shares}) == 1
    everything = [int(row) for parts in shares for part in parts for row in part]
    assert sorted(everything) == list(range(len(numbers)))
    if whole:
        for parts in shares:
            for part in parts:
                assert all(
                    (numbers == number).sum() == (numbers[part] == number).sum()
                    for number in numbers[part]
                )


@examples(200)
@given(GROUPS, st.integers(1, 5), st.integers(1, 120), st.booleans())
def test_no_micro_batch_is_above_the_limit_that_can_be_below_it(groups, ranks, limit, whole):
    tokens, offsets, numbers = step(groups)
    alone = (
        [unit.cost for unit in units(tokens, offsets, numbers)]
        if whole
        else np.diff(offsets).tolist()
    )
    for parts in deal(tokens, offsets, numbers, ranks, limit, whole=whole):
        assert max(costs_of(tokens, offsets, parts), default=0) <= max([limit, *alone])


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 6), st.integers(1, 5))
def test_ranks_that_meet_in_every_micro_batch_wait_for_one_unit_at_most_in_a_step(
    costs, ranks, count
):
    loads = [
        [sum(costs[number] for number in each) for each in bins]
        for bins in spread(costs, ranks, count)
    ]
    assert [len(bins) for bins in loads] == [count] * ranks
    together = sum(max(at) for at in zip(*loads, strict=True))
    assert together <= sum(costs) / ranks + max(costs, default=0)


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 12))
def test_between_the_fullest_and_the_emptiest_lies_no_more_than_the_largest(costs, bins):
    filled = fill(costs, bins)
    loads = [sum(costs[number] for number in each) for each in filled]
    assert sorted(number for each in filled for number in each) == list(range(len(costs)))
    assert max(loads) - min(loads) <= max(costs, default=0)


@given(GROUPS, st.integers(1, 60), st.integers(1, 60))
def test_pieces_of_a_group_are_its_rollouts_in_order_and_keep_the_limit(groups, share, limit):
    tokens, offsets, numbers = step(groups)
    for unit in units(tokens, offsets, numbers):
        found = pieces(tokens, offsets, unit, min(share, limit), limit)
        assert [row for each in found for row in range(each.first, each.last)] == [
            *range(unit.first, unit.last)
        ]
        for each in found:
            assert each.cost == cost(tokens, offsets, each.first, each.last)
            assert each.cost <= limit or each.last - each.first == 1


def test_a_group_that_is_no_more_than_an_even_share_stays_whole():
    tokens, offsets, numbers = step([(8, [4, 4, 4])] * 6)
    shares = deal(tokens, offsets, numbers, 3, 1000)
    assert [[numbers[part].tolist() for part in parts] for parts in shares] == [
        [[0] * 3 + [21] * 3],
        [[7] * 3 + [28] * 3],
        [[14] * 3 + [35] * 3],
    ]


def test_one_group_is_cut_rather_than_that_a_rank_stands_idle_unless_the_loss_needs_it_whole():
    tokens, offsets, numbers = step([(2, [10, 10, 10, 10])])
    assert units(tokens, offsets, numbers) == [DealtRollouts(0, 4, 42)]
    cut = deal(tokens, offsets, numbers, 2, 1000)
    assert [[part.tolist() for part in parts] for parts in cut] == [[[0, 1]], [[2, 3]]]
    whole = deal(tokens, offsets, numbers, 2, 1000, whole=True)
    assert [[part.tolist() for part in parts] for parts in whole] == [[[0, 1, 2, 3]], [[]]]


def test_a_share_has_the_rows_of_its_micro_batches():
    rows = rows_of(*[group(number, size=4) for number in range(5)])
    computed = np.array([0, 1, 2, 5, 6, 9, 11, 12, 17])
    shares = dealt(Prepared(rows=rows, computed=computed), 2, 30, False)
    held = []
    for share in shares:
        assert sum(share.counts) == share.rows.rollouts
        for at, rollout in enumerate(share.rows.rollout_ids_R.tolist()):
            row = rows.rollout_ids_R.tolist().index(rollout)
            held.append(row)
            mine = slice(share.rows.offsets[at], share.rows.offsets[at + 1])
            its = slice(rows.offsets[row], rows.offsets[row + 1])
            assert share.rows.tokens.ids[mine].tolist() == rows.tokens.ids[its].tolist()
            assert share.rows.tokens.logprobs[mine].tolist() == rows.tokens.logprobs[its].tolist()
            assert share.rows.columns_R["advantage"][at] == rows.columns_R["advantage"][row]
    assert sorted(held) == computed.tolist()


def test_of_ranks_that_compute_the_same_one_is_sent_the_rows():
    rows = rows_of(*[group(number, size=4) for number in range(4)])
    shares = dealt(Prepared(rows=rows, computed=np.arange(rows.rollouts)), 3, 30, False)
    assert addressed(shares, 1) == {1: shares[1], 2: shares[2]}
    messages = addressed(shares, 2)
    assert sorted(messages) == [1, 2, 3, 4, 5]
    assert messages[2] is shares[1] and messages[4] is shares[2]
    assert [messages[rank] for rank in (1, 3, 5)] == [ShareAlike()] * 3


def test_rows_come_through_a_message_as_they_were():
    rows = rows_of(group(0, size=3), group(1, size=2))
    ids = np.arange(4, dtype=np.int32)
    kept = SamplingMask(ids=ids, offsets=np.r_[0, 4, np.full(len(rows.tokens.ids) - 1, 4)])
    for given_rows in (
        rows,
        chosen(rows, np.array([3, 1])),
        chosen(replace(rows, tokens=replace(rows.tokens, sampling_mask=kept)), np.arange(5)),
    ):
        found = CODEC.decode(CODEC.encode(Share(given_rows, (2, 3))))
        assert found.counts == (2, 3)
        again = found.rows
        for name, value in vars_of(given_rows).items():
            same(value, getattr(again, name))
        assert again.tokens.ids.flags.writeable


def vars_of(rows):
    return {name: getattr(rows, name) for name in type(rows).__dataclass_fields__}


def same(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            same(one[name], other[name])
    elif isinstance(one, RolloutTokens | SamplingMask):
        same(vars_of(one), vars_of(other))
    elif one is None:
        assert other is None
    else:
        assert one.dtype == other.dtype and one.tolist() == other.tolist()


def test_micro_batches_in_order_are_neighbours_and_may_be_empty():
    assert [part.tolist() for part in in_order([2, 0, 3])] == [[0, 1], [], [2, 3, 4]]
    assert in_order([]) == []


def test_arguments_come_through_a_message_paths_as_paths(tmp_path):
    given_arguments = {"folder": tmp_path, "facts": {"step": 3, "node": "trainer"}}
    call = CODEC.decode(CODEC.encode(CallFunction.of(chosen, given_arguments)))
    assert call.arguments == given_arguments
    assert function_of(call.function) is chosen
