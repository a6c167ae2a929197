"""Whatever is accepted runs, and learns what one rank learns: graphs are drawn, make two steps, and
are compared.
"""

from random import Random

import numpy as np
import pytest

from .draw import Computes, Drawn
from .outcome import DrawnRuns, RunFigures, listed

pytestmark = [pytest.mark.usefixtures("machine", "one_core"), pytest.mark.timeout(120)]

ALL = 200
EVERY_KIND = (49, 99, 125, 178, 192)
"""Of these, those of few processes that have every kind of rank; the slow ones meet each other in
every way."""
QUICK = (99, 178)
"""Of these, two."""


def accepted(outcomes: DrawnRuns, number: int) -> Drawn:
    """The first graph of a seed that is not refused; what is refused on the way stands in the
    page.
    """
    draw = Random(number)
    while why := outcomes.refusal(drawn := Drawn.of(draw)):
        assert listed(why), f"docs/refused.md does not say it: {why}"
    return drawn


def alike(found: RunFigures, one: RunFigures, tolerance: float = 1e-5) -> None:
    """Two runs drew the same tokens of the same versions, and learned the same from them.

    Sums of ranks differ in their last bits, and eps of Adam is so large that this stays so.
    """
    assert not found.verdict
    assert [row[:3] + row[4:] for row in found.rollouts] == [
        row[:3] + row[4:] for row in one.rollouts
    ]
    for ours, theirs in zip(found.rollouts, one.rollouts, strict=True):
        np.testing.assert_allclose(ours[3], theirs[3], rtol=0, atol=tolerance)
    np.testing.assert_allclose(found.losses, one.losses, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(
        found.grad_norms, one.grad_norms, rtol=10 * tolerance, atol=tolerance
    )


def as_good(found: RunFigures, one: RunFigures) -> None:
    """Two runs drew the same prompts from the same versions, and what was said of the tokens is as
    near the truth.
    """
    assert not found.verdict
    versions = [
        [(group, position, {*of} - {-1}) for group, position, _, _, of in each.rollouts]
        for each in (found, one)
    ]
    assert versions[0] == versions[1]
    assert max(found.mismatches) <= 3 * max(one.mismatches) + 1e-5


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in range(ALL)]
)
def test_a_drawn_graph_learns_what_one_rank_learns(outcomes: DrawnRuns, number: int) -> None:
    """Where a weight lies between two steps of int8, the last bits of ranks decide, which moves
    logits by about 1e-4. Ranks that share out a row of inputs round their own parts of it
    (int8_dynamic), and sample from another model.
    """
    drawn = accepted(outcomes, number)
    found, one = outcomes.drawn(drawn), outcomes.on_one_rank(drawn.computes)
    if drawn.computes.weights == "int8_dynamic" and drawn.parallel > 1:
        as_good(found, one)
    else:
        alike(found, one, 1e-5 if drawn.computes.weights == "model" else 1e-3)


def test_a_reference_that_has_no_version_yet_takes_its_turn_with_the_weights_it_was_read_with(
    outcomes: DrawnRuns,
) -> None:
    drawn = Drawn(computes=Computes(has_reference=True, refreshed="average", every=2), shares=True)
    alike(outcomes.drawn(drawn), outcomes.on_one_rank(drawn.computes))


def kinds(drawn: Drawn) -> set[tuple[object, ...]]:
    """What is of interest of a draw."""
    computes, several = (
        drawn.computes,
        {"reader": drawn.parallel > 1, "trainer": drawn.trainer_ranks > 1},
    )
    found: set[tuple[object, ...]] = {
        (name, getattr(drawn, name))
        for name in (
            "trainer_ranks",
            "trainer_parallel",
            "trainer_replicas",
            "parallel",
            "replicas",
            "references",
            "reference_parallel",
            "weights",
        )
    }
    found |= {
        (name, getattr(computes, name))
        for name in ("weights", "refreshed", "has_adapters", "has_reference")
    }
    found.add(("every", computes.every))
    if drawn.shares:
        found |= {("shares", whose, many) for whose, many in several.items()}
    if drawn.scale:
        found.add(("scale", drawn.scale[1]["generator"]))
    return found


@pytest.mark.slow
def test_the_few_draws_have_every_kind_of_rank(outcomes: DrawnRuns) -> None:
    found = set().union(*(kinds(accepted(outcomes, number)) for number in EVERY_KIND))
    for name, values in {
        "trainer_ranks": {1, 2, 4},
        "trainer_parallel": {1, 2},
        "trainer_replicas": {1, 2},
        "parallel": {1, 2, 4},
        "replicas": {1, 2},
        "references": {1, 2},
        "reference_parallel": {1, 2, 4},
        "every": {1, 2},
        "weights": {None, "shared_memory", "gloo", "model", "int8", "int8_dynamic"},
        "refreshed": {"never", "newest", "average"},
        "has_adapters": {True, False},
        "has_reference": {True, False},
        "scale": {1, 2},
    }.items():
        assert {kind[1] for kind in found if kind[0] == name} == values, name
    assert {kind[1:] for kind in found if kind[0] == "shares"} == {
        (whose, several) for whose in ("reader", "trainer") for several in (True, False)
    }


def test_a_refusal_that_the_page_does_not_have_is_seen(outcomes: DrawnRuns) -> None:
    refused = outcomes.refusal(Drawn(computes=Computes(), trainer_ranks=3, trainer_parallel=2))
    assert "which does not divide them" in refused and listed(refused)
    assert not listed("'trainer' is refused for a reason of its own; do another thing")


def test_weights_that_do_not_arrive_are_seen(outcomes: DrawnRuns) -> None:
    """What the comparison is worth: a trainer that learns nothing draws other rollouts, or learns
    otherwise.
    """
    learned, stale = outcomes.on_one_rank(Computes()), outcomes.on_one_rank(Computes(lr=0.0))
    assert learned.losses[0] == stale.losses[0]
    with pytest.raises(AssertionError):
        alike(stale, learned)
    assert abs(learned.losses[1] - stale.losses[1]) > 1e-3 or learned.rollouts != stale.rollouts
