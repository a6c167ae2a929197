"""Laws of packing: every prefix once, every trained token behind its own, micro-batches within
limits.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from dataflow.tokens.ragged import gather
from operators.training.learner.rows import TokenTree, pack, split

ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=9),
    min_size=1,
    max_size=9,
)


def _flat(rows: list[list[tuple[int, bool]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = np.array([token for row in rows for token, _ in row], np.int32)
    mask = np.array([chosen for row in rows for _, chosen in row], bool)
    return tokens, mask, np.r_[0, np.cumsum([len(row) for row in rows])]


def _path(packed: TokenTree, node: int) -> list[int]:
    """Tokens that the node attends to in the row that its output is taken from."""
    at = int(packed.back_N[node])
    for bucket in packed.buckets:
        if at < bucket.size:
            row, column = divmod(at, bucket.shape[1])
            return packed.tokens_N[bucket[row, : column + 1]].tolist()
        at -= bucket.size
    raise AssertionError(f"node {node} stands in no bucket")


@given(ROWS, st.booleans())
@examples(200)
def test_every_trained_token_is_predicted_behind_its_own_prefix(rows, share):
    packed = pack(*_flat(rows), share=share)
    wanted = [
        (index, at)
        for index, row in enumerate(rows)
        for at, (_, chosen) in enumerate(row)
        if chosen and at > 0
    ]
    assert len(packed.targets_T) == len(wanted)
    offsets = _flat(rows)[2]
    for place, (index, at) in enumerate(wanted):
        node = int(packed.heads_U[packed.head_T[place]])
        assert packed.targets_T[place] == rows[index][at][0]
        assert packed.flat_T[place] == offsets[index] + at
        assert packed.row_T[place] == index
        assert packed.positions_N[node] == at - 1
        assert _path(packed, node) == [token for token, _ in rows[index][:at]]


@given(ROWS)
@examples(200)
def test_every_prefix_is_computed_exactly_once(rows):
    packed = pack(*_flat(rows))
    needed = set()
    for row in rows:
        chosen = [at for at, (_, is_chosen) in enumerate(row) if is_chosen and at > 0]
        if chosen:
            needed |= {tuple(token for token, _ in row[: at + 1]) for at in range(chosen[-1])}
    assert packed.nodes == len(needed)


def test_rollouts_without_a_chosen_token_cost_nothing():
    packed = pack(np.arange(6), np.zeros(6, bool), np.array([0, 3, 6]))
    assert packed.nodes == 0
    assert packed.buckets == ()
    assert len(packed.targets_T) == 0


def test_a_group_of_equal_rollouts_costs_as_much_as_one():
    row = np.arange(5, dtype=np.int32)
    one = pack(row, row > 1, np.array([0, 5]))
    eight = pack(np.tile(row, 8), np.tile(row > 1, 8), np.arange(9) * 5)
    assert eight.nodes == one.nodes == 4
    assert [bucket.shape for bucket in eight.buckets] == [(1, 4)]
    assert len(eight.targets_T) == 8 * len(one.targets_T)


def test_long_rows_do_not_share_a_bucket_with_short_ones():
    lengths = [10, 12, 30, 200, 210, 900]
    offsets = np.r_[0, np.cumsum(lengths)]
    tokens = np.random.default_rng(0).integers(0, 1000, offsets[-1])
    packed = pack(tokens, np.ones(offsets[-1], bool), offsets)
    assert [bucket.shape for bucket in packed.buckets] == [(3, 29), (2, 209), (1, 899)]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=8),
    st.integers(1, 60),
    st.integers(0, 9),
)
@examples(100)
def test_micro_batches_hold_every_rollout_once_and_stay_below_the_limit(groups, limit, seed):
    draw = np.random.default_rng(seed)
    rows, ids = [], []
    for index, (size, longest) in enumerate(groups):
        for _ in range(size):
            rows.append(draw.integers(0, 2, int(draw.integers(1, longest + 1))))
            ids.append(index)
    offsets = np.r_[0, np.cumsum([len(row) for row in rows])]
    batches = split(np.concatenate(rows), offsets, np.array(ids), limit)
    assert np.concatenate(batches).tolist() == list(range(len(rows)))
    for batch in batches:
        positions, ends = gather(offsets, batch)
        tokens = np.concatenate(rows)[positions]
        nodes = pack(tokens, np.ones(len(tokens), bool), ends).nodes
        assert nodes <= limit or len(batch) == 1


def test_groups_stay_whole_where_they_fit():
    offsets = np.arange(0, 49, 4)
    batches = split(np.arange(48), offsets, np.repeat(np.arange(4), 3), limit=24)
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize("rows", [[0], [2, 0], [1, 1]])
def test_gathered_rows_are_the_rows(rows):
    offsets = np.array([0, 2, 2, 5])
    positions, ends = gather(offsets, np.array(rows))
    wanted = [list(range(offsets[row], offsets[row + 1])) for row in rows]
    assert positions.tolist() == [at for row in wanted for at in row]
    assert ends.tolist() == [0, *np.cumsum([len(row) for row in wanted]).tolist()]
