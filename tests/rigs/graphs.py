"""Graphs to run: of fakes, which are over in milliseconds, and of the real operators around a tiny
policy; and the losses that runs leave.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dataflow import Graph, Model, scorer
from dataflow.folder.run_folder import RunFolder
from dataflow.node import Generate, Learn, Source
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

NO_BOUND = 1_000_000
"""Staleness: the fake trainer makes no versions, so its generator falls behind by one with each
step."""

Scorer = Callable[..., Any]


@scorer(isolate=False)
def reward(completion: str) -> float:
    """The share of letters that stand early in the alphabet: varied for a random policy, and easy
    to raise.
    """
    return sum(letter in "abcdefgh" for letter in completion) / max(1, len(completion))


def fake_graph(
    *,
    source: Source | None = None,
    generator: Generate | None = None,
    scorers: Sequence[Scorer] = (reward,),
    trainer: Learn | None = None,
    count: int | None = 64,
    prompts_per_step: int = 8,
    max_staleness: int = NO_BOUND,
) -> Graph:
    """Fakes in processes of their own, scorers between them."""
    g, model = Graph("fakes"), Model("fake-policy")
    generator = generator or FakeGenerator(model=model)
    trainer = trainer or FakeTrainer(model=model, prompts_per_step=prompts_per_step)
    stream = generator(g.source(source or FakePrompts(size=count)))
    for each in scorers:
        stream = each(stream)
    trainer(stream)
    if generator.uses is not None and generator.uses == trainer.uses:
        g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


def words(count: int = 40) -> list[dict[str, str]]:
    """Prompts for the tiny policy."""
    return [{"prompt": f"{chr(97 + n % 26)}{n}=", "answer": str(n)} for n in range(count)]


def tiny_graph(
    policy: Path,
    *,
    prompts: Any = None,
    max_staleness: int = 2,
    scorers: Sequence[Scorer] = (reward,),
    eval_every: int | None = None,
    prompts_per_step: int = 4,
    max_tokens: int = 24,
    epochs: int | None = None,
    reference_ranks: int = 0,
    generator_knobs: dict[str, Any] | None = None,
    model_knobs: dict[str, Any] | None = None,
    **trainer_knobs: Any,
) -> Graph:
    """The real operators around a tiny policy with random weights; beside a frozen reference of so
    many ranks, if any.
    """
    from operators import Evaluate, Generator, Logprobs, Prompts, Trainer
    from operators.credit import advantage
    from operators.losses import aipo, with_kl

    g, model = Graph("tiny"), Model(str(policy), **(model_knobs or {}))
    knobs: dict[str, Any] = {
        "group_size": 4,
        "max_tokens": max_tokens,
        "segment_tokens": 4,
        "slots": 32,
    }
    generator = Generator(model, **(knobs | (generator_knobs or {})))
    knobs = {"prompts_per_step": prompts_per_step, "lr": 1e-2, "normalize": "rollouts"}
    loss = partial(aipo, rho=4.0)
    if reference_ranks:
        loss = with_kl(loss, beta=0.1)
    trainer = Trainer(model, loss=loss, **(knobs | trainer_knobs))
    source = Prompts(words() if prompts is None else prompts, columns=("answer",), epochs=epochs)

    def scored(source: Any) -> Any:
        stream = generator(g.source(source))
        for each in scorers:
            stream = each(stream)
        return stream

    rollouts = scored(source)
    if reference_ranks:
        rollouts = Logprobs(model.frozen(), tensor_parallel=reference_ranks)(rollouts)
    trainer(advantage(rollouts))
    if eval_every is not None:
        held_out = Prompts(words(6), columns=("answer",), name="held_out", group_size=2)
        Evaluate(every_steps=eval_every)(scored(held_out))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


def losses(folder: Path) -> list[float]:
    """Of the steps of a run."""
    return [line["loss"] for line in RunFolder.open(folder).read_metrics() if "loss" in line]
