"""What `bench.episodes` says of a system that ran some of the episodes: what all of them would have
taken.
"""

import random
from argparse import Namespace

import pytest

from bench.episodes.__main__ import rows_of, worlds_s
from bench.episodes.subset import evenly, seconds_of_all, together_s

WANTED = Namespace(episodes=1024, turns=4, scale=1.0)


@pytest.mark.parametrize("count", [1, 8, 64, 256])
def test_a_system_that_calls_worlds_one_after_the_other_takes_what_is_extrapolated(
    count: int,
) -> None:
    """Whichever episodes it ran, though their worlds have a heavy tail."""
    rows, own_s = rows_of(WANTED), 0.05
    ran = [row["number"] for row in evenly(rows, count)]
    assert len({*ran}) == count and max(ran) >= 256 * (count - 1) // count
    each, all_worlds = worlds_s(ran, WANTED), sum(worlds_s(range(256), WANTED))
    waited_s = sum(each)
    found = seconds_of_all(
        waited_s + 4 * count * own_s,
        waited_s,
        share=count / 256,
        worlds_share=waited_s / all_worlds,
    )
    assert found == pytest.approx(all_worlds + 1024 * own_s)


def test_worlds_that_are_at_work_at_once_are_counted_once() -> None:
    rng = random.Random(0)
    spans = [(begin, begin + rng.randint(1, 9)) for begin in rng.choices(range(200), k=50)]
    seconds = {second for begin, end in spans for second in range(begin, end)}
    assert together_s([(float(begin), float(end)) for begin, end in spans]) == len(seconds)
