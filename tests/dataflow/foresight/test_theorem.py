"""LlamaRL's theorem, on what the search finds: asynchronous is never slower, and faster where
shared memory binds.
"""

from hypothesis import assume, given
from hypothesis import strategies as st
from memory_bounds import Best, Problem, best_asynchronous, best_synchronous
from rigs.examples import examples

NUMBER = st.floats(0.1, 10)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Per sample, a part that each pays and one that a micro-batch shares; state is larger than
    weights.
    """
    train, shared, make, read = (draw(NUMBER) for _ in range(4))
    weights = draw(st.floats(1, 200))
    return Problem(
        devices=draw(st.sampled_from([64, 256, 1024])),
        memory_bytes=80,
        samples=2048,
        train_s=lambda b: train + shared / b,
        generate_s=lambda b: make + 20 * read / b,
        trained_bytes=8 * weights,
        generating_bytes=weights,
        activation_bytes=draw(st.floats(0.05, 5)),
        cache_bytes=draw(st.floats(0.01, 5)),
    )


def both(problem: Problem, **how: bool) -> tuple[Best, Best]:
    sync, other = best_synchronous(problem), best_asynchronous(problem, **how)
    assume(sync is not None)
    assert sync is not None and other is not None, "what fits together fits apart"
    return sync, other


@given(problems())
@examples(150)
def test_the_best_asynchronous_placement_is_never_slower_where_devices_may_be_split(
    problem: Problem,
) -> None:
    sync, other = both(problem)
    assert other.seconds <= sync.seconds * (1 + 1e-4)


@given(problems())
@examples(150)
def test_it_is_faster_wherever_the_bound_that_both_share_binds(problem: Problem) -> None:
    sync, other = both(problem)
    assume(sync.binds)
    assert other.seconds < sync.seconds


def test_with_whole_copies_it_need_not_hold() -> None:
    """Two devices, and a trainer that takes nearly all of the time: one device less costs more than
    memory gives.
    """
    problem = Problem(
        devices=2,
        memory_bytes=80,
        samples=64,
        train_s=lambda b: 10.0,
        generate_s=lambda b: 0.5,
        trained_bytes=8,
        generating_bytes=1,
        activation_bytes=1,
        cache_bytes=1,
    )
    sync, split, whole = (
        best_synchronous(problem),
        best_asynchronous(problem),
        best_asynchronous(problem, whole=True),
    )
    assert sync and split and whole
    assert split.seconds <= sync.seconds * (1 + 1e-4) < whole.seconds


@given(problems())
@examples(50)
def test_whole_copies_are_never_faster_than_split_ones_and_come_near_with_many(
    problem: Problem,
) -> None:
    split, whole = best_asynchronous(problem), best_asynchronous(problem, whole=True)
    assume(split is not None and whole is not None)
    assert split is not None and whole is not None
    assert whole.seconds >= split.seconds * (1 - 1e-4)
    if problem.devices >= 64 * max(split.train_split, split.generate_split):
        fewest = min(
            split.train_devices / split.train_split, split.generate_devices / split.generate_split
        )
        assert whole.seconds <= split.seconds * (1 + 2 / max(1.0, fewest - 1))
