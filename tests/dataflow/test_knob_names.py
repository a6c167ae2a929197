"""Knobs that nothing here has: each refusal names what was meant, by the names of other systems
too.
"""

from functools import partial
from typing import Any

import pytest

from dataflow import Graph, GraphError, LoRA, Model, collect, run
from dataflow.errors import OTHER_NAMES, hint
from dataflow.limits import Limits
from dataflow.runner import make_plan
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from operators import Evaluate, Generator, Prompts, Trainer
from operators.losses import dpo, grpo, with_kl

MODEL = Model("policies/tiny")


def graph() -> Graph:
    made = Graph("test")
    FakeTrainer(prompts_per_step=2)(FakeGenerator()(made.source(FakePrompts())))
    return made


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Trainer(MODEL, learning_rate=1e-6),
            r"no knob 'learning_rate' .*; did you mean 'lr'\?",
        ),
        (lambda: Trainer(MODEL, learningrate=1e-6), "did you mean 'lr'"),
        (lambda: Trainer(MODEL, per_device_train_batch_size=8), "did you mean 'prompts_per_step'"),
        (lambda: Trainer(MODEL, num_generations=8), r"that is Generator\(group_size=\.\.\.\)"),
        (lambda: Trainer(MODEL, beta=0.04), r"that is Trainer\(loss=with_kl\("),
        (lambda: Trainer(MODEL, seed=1), r"that is run\(graph, seed="),
        (lambda: Generator(MODEL, max_completion_length=8), "did you mean 'max_tokens'"),
        (lambda: Generator(MODEL, n=8), "did you mean 'group_size'"),
        (lambda: Prompts("rows.jsonl", train_files="rows.jsonl"), "did you mean 'source'"),
        (lambda: Prompts("rows.jsonl", seed=1), "did you mean 'shuffle_seed'"),
        (lambda: Evaluate(eval_steps=8), "did you mean 'every_steps'"),
        (lambda: LoRA(lora_alpha=8), "did you mean 'alpha'"),
        (lambda: Model("policy", lora_rank=8), r"that is LoRA\(rank="),
        (lambda: Limits(hang=3.0), "did you mean 'hang_s'"),
        (
            lambda: Trainer(),
            r"missing a required argument: 'model'; write Trainer\(model, \.\.\.\)",
        ),
        (lambda: Trainer(MODEL, 1e-6), "too many positional arguments; write Trainer"),
        (
            lambda: run(graph(), inline=True),
            r"no knob 'inline' .*; that is run\(graph, on=inline\(\)\)",
        ),
        (lambda: run(graph(), on=True), r"on inline\(\) or on a launcher, but on is True"),
        (lambda: run(graph(), max_steps=3), "did you mean 'steps'"),
        (lambda: make_plan(graph(), replica={"generator": 2}), "did you mean 'replicas'"),
        (lambda: collect(graph().source(FakePrompts(name="more")), row=3), "did you mean 'rows'"),
        (lambda: graph().feedback(None, None, staleness=3), "did you mean 'max_staleness'"),
        (lambda: grpo(epsilon=0.2), "grpo has no knob 'epsilon' .*; did you mean 'clip_low'"),
        (lambda: grpo(clip_low=0.2), r"write functools\.partial\(grpo, \.\.\.\), which sets knobs"),
        (
            lambda: with_kl(grpo, kl_coef=0.1),
            "with_kl has no knob 'kl_coef' .*; did you mean 'beta'",
        ),
    ],
)
def test_an_unknown_knob_is_refused_with_the_one_that_was_meant(make: Any, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        make()


def test_a_knob_that_is_like_none_is_refused_with_the_nearest_alone() -> None:
    with pytest.raises(GraphError) as error:
        Trainer(MODEL, foo=1)
    assert "the nearest that it has are" in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (partial(grpo, epsilon=0.2), "'clip_low'"),
        (partial(grpo, clip_ratio_high=0.2), "'clip_high'"),
        (partial(dpo, kl_coef=0.2), "'beta'"),
        (partial(grpo, kl_coef=0.2), r"with_kl\(loss, beta="),
    ],
)
def test_a_losss_knobs_are_known_by_the_names_of_other_systems(loss: Any, said: str) -> None:
    with pytest.raises(
        GraphError, match=rf"loss '\w+' .* has no knob .*; (did you mean|that is) .*{said}"
    ):
        g = Graph("test")
        Trainer(MODEL, loss=loss)(Generator(MODEL)(g.source(FakePrompts())))
        g.check()


@pytest.mark.parametrize(
    "place", [place for place in OTHER_NAMES if place.startswith(("Trainer(", "Generator("))]
)
def test_what_a_refusal_tells_to_write_is_a_knob(place: str) -> None:
    owner, knob = place.partition("(")[0], place.partition("(")[2].partition("=")[0]
    assert knob in {"Trainer": Trainer, "Generator": Generator}[owner].__dataclass_fields__
    assert all(
        place in hint(name, ()) or "; that is" in hint(name, ())
        for name in OTHER_NAMES[place].split()
    )
