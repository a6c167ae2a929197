"""Other values for the knobs of a graph: which may change, of what kind, and what goes along with
them.
"""

from functools import partial
from typing import Any

import pytest

from dataflow import Graph, GraphError, Model, keep, scorer
from dataflow.planning.set_values import settable_of
from operators import Generator, Logprobs, Prompts, Trainer
from operators.credit import advantage
from operators.losses import aipo

MODEL = Model("policies/tiny")


@scorer
def reward(completion: str, scale: float = 1.0) -> float:
    """Scaled."""
    return scale


@keep
def long(completion: list[str], least: int = 3) -> bool:
    """Filtered."""
    return len(completion) > least


@pytest.fixture
def graph() -> Graph:
    g = Graph("set")
    generator = Generator(MODEL, group_size=2, max_tokens=8)
    trainer = Trainer(MODEL, loss=partial(aipo, rho=3.0), prompts_per_step=4)
    rows = Logprobs(MODEL.frozen())(generator(g.source(Prompts(["a", "b", "c", "d"]))))
    trainer(advantage(long(reward(rows))))
    g.feedback(trainer.weights, generator, max_staleness=2)
    return g


def test_each_operator_says_what_may_change(graph: Graph) -> None:
    assert {"lr", "weight_decay", "max_grad_norm", "rho"} <= settable_of(graph, "trainer").keys()
    assert {"temperature", "top_p", "max_tokens", "max_staleness"} <= settable_of(
        graph, "generator"
    ).keys()
    assert settable_of(graph, "reward").keys() == {"scale"} and settable_of(
        graph, "long"
    ).keys() == {"least"}
    assert settable_of(graph, "ref_logprobs") == {} == settable_of(graph, "prompts")


def test_values_take_their_place_and_what_computes_log_probabilities_follows_the_temperature(
    graph: Graph,
) -> None:
    wishes = {
        "trainer.lr": 1,
        "trainer.rho": 2,
        "generator.temperature": 0.5,
        "generator.max_staleness": 3,
        "reward.scale": 4,
        "long.least": 7,
    }
    made = graph.set_knobs(wishes)
    found: dict[str, Any] = dict(made.operators)
    assert found["trainer"].lr == 1.0 and found["trainer"].loss_function.knobs["rho"] == 2.0
    assert [found[name].temperature for name in ("generator", "trainer", "ref_logprobs")] == [
        0.5
    ] * 3
    assert found["reward"].given_knobs == {"scale": 4.0} and found["long"].given_knobs == {
        "least": 7
    }
    assert made.feedbacks[0].max_staleness == 3 and graph.feedbacks[0].max_staleness == 2
    assert graph.operators["trainer"].settable()["rho"].value == 3.0, "the one before stays"


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"trainer.lr": -1.0}, "give a number above 0"),
        ({"trainer.lr": "fast"}, "cannot take 'fast'; give a number"),
        ({"trainer.lr": True}, "give a number"),
        ({"generator.max_tokens": 1.5}, "give a whole number"),
        ({"generator.temperature": 0}, "has temperature=0.0; give a number above 0"),
        ({"generator.max_staleness": -1}, "cannot be -1"),
        ({"reward.scale": None}, "give a number"),
        ({"trainer.prompts_per_step": 2}, "no knob that may change"),
        ({"trainer.lrr": 2}, "did you mean 'lr'"),
        ({"trainr.lr": 2}, "did you mean 'trainer'"),
        ({"trainer": 2}, "these may: trainer.rho = 3.0"),
    ],
)
def test_what_may_not_change_and_what_does_not_fit_is_refused(
    graph: Graph, wish: Any, says: str
) -> None:
    with pytest.raises(GraphError) as refused:
        graph.set_knobs(wish)
    assert says in str(refused.value)
