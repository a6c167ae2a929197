"""Pairs of ranks in matchings: every pair once, no rank twice in one, none waiting in a circle."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from rigs.examples import examples

from transport.weights.layout.plan import LIKE, NEAR, matchings, slowest

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 9))


def degree(pair_bytes) -> int:
    """Peers of the rank that has most."""
    used = pair_bytes > 0
    return int(max(used.sum(axis=0).max(), used.sum(axis=1).max()))


def tables(elements):
    """Bytes of pairs; many have none."""
    return SHAPES.flatmap(lambda shape: arrays.arrays(np.int64, shape, elements=elements))


ANY = tables(st.one_of(st.just(0), st.integers(1, 1000)))
ALIKE = tables(st.sampled_from([0, 0, 100, 120, 149]))


def check(table, pair_bytes) -> None:
    assert ((table >= 0) == (pair_bytes > 0)).all(), "every pair once, and no other"
    for number in range(int(table.max(initial=-1)) + 1):
        sources, destinations = np.nonzero(table == number)
        assert len(sources), "none is empty"
        assert len(set(sources.tolist())) == len(sources), "a rank sends to one at most"
        assert len(set(destinations.tolist())) == len(destinations)


@examples(200)
@given(pair_bytes=ANY)
def test_they_are_a_proper_colouring_of_every_pair(pair_bytes):
    check(matchings(pair_bytes), pair_bytes)


@examples(200)
@given(pair_bytes=ALIKE)
def test_pairs_of_like_sizes_need_as_many_as_the_busiest_rank_has_peers(pair_bytes):
    assert LIKE > 149 / 100
    assert matchings(pair_bytes).max(initial=-1) + 1 == degree(pair_bytes)


@examples(200)
@given(pair_bytes=ANY)
def test_they_never_take_longer_than_one_colouring_of_all_pairs_could(pair_bytes):
    largest = int(slowest(matchings(pair_bytes), pair_bytes).sum())
    assert largest <= NEAR * degree(pair_bytes) * pair_bytes.max()


@examples(200)
@given(pair_bytes=ANY, seed=st.integers(0, 1000))
def test_ranks_that_go_through_them_in_order_never_wait_in_a_circle(pair_bytes, seed):
    """Each rank has one message under way, and goes on when its peer has come to it too: whoever is
    looked at first, all come to their end.
    """
    table, random = matchings(pair_bytes), np.random.default_rng(seed)
    left = {}
    for side, count in enumerate(table.shape):
        for rank in range(count):
            mine = table[rank] if side == 0 else table[:, rank]
            peers = np.flatnonzero(mine >= 0)
            left[side, rank] = peers[np.argsort(mine[peers])].tolist()
    while any(left.values()):
        waiting = [
            rank
            for rank in range(table.shape[0])
            if left[0, rank] and left[1, left[0, rank][0]][:1] == [rank]
        ]
        assert waiting, "each waits for one that waits for another"
        source = int(random.choice(waiting))
        left[1, left[0, source].pop(0)].pop(0)


def test_every_rank_computes_the_same_ones():
    pair_bytes = np.random.default_rng(0).integers(0, 5, (40, 30)) * 1000
    assert np.array_equal(matchings(pair_bytes), matchings(pair_bytes.copy()))


def test_large_pairs_go_together_so_that_small_ones_do_not_wait_for_them():
    """A trainer's rank has most of its bytes for one of a replica's tensor-parallel ranks."""
    pair_bytes = np.full((64, 64), 10)
    for rank in range(64):
        pair_bytes[rank, rank // 8 :: 8] = 160
    table = matchings(pair_bytes)
    check(table, pair_bytes)
    floor = max(pair_bytes.sum(axis=0).max(), pair_bytes.sum(axis=1).max())
    assert slowest(table, pair_bytes).sum() == floor
    assert table.max() + 1 == 64
