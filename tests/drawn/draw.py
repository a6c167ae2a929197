"""What a seed makes of a graph: what it computes, and on which ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from dataflow import Graph, LoRA, Model, scorer
from operators import Generator, Logprobs, Prompts, Trainer
from operators.credit import advantage
from operators.losses import aipo

STEPS, PROMPTS, GROUP = 2, 2, 2


@scorer(isolate=False)
def reward(completion: str) -> float:
    """Varied for a random policy."""
    return sum(letter in "abcdefgh" for letter in completion) / max(1, len(completion))


@scorer(isolate=False, name="reward")
def closeness(completion: str, logprobs: list[float], ref_logprobs: list[float]) -> float:
    """The same, less what the policy has moved from its reference."""
    early = sum(letter in "abcdefgh" for letter in completion) / max(1, len(completion))
    return early - 0.1 * sum(
        ours - theirs for ours, theirs in zip(logprobs, ref_logprobs, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class Computes:
    """What a graph computes, on however many ranks."""

    weights: str = "model"
    """Of the generator: its precision."""
    has_adapters: bool = False
    has_reference: bool = False
    refreshed: str = "never"
    """With what its reference is: the newest weights, or their moving average."""
    every: int = 1
    """Steps after which it is, where it is."""
    lr: float = 1e-2


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A graph, and what its operators run on."""

    computes: Computes
    trainer_ranks: int = 1
    trainer_parallel: int = 1
    """How many of these share out a tensor; the others share out the data."""
    trainer_replicas: int = 1
    """How many copies of the model they hold (HSDP)."""
    parallel: int = 1
    """Ranks of each replica of the generator."""
    replicas: int = 1
    references: int = 1
    """Replicas of the reference, where there is one."""
    reference_parallel: int = 1
    """Ranks of each of them."""
    weights: str | None = None
    """The executor that carries them; None: the plan chooses."""
    scale: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """How many replicas of the generator there are from a step on."""
    shares: bool = False
    """Whether all take turns on one memory."""

    @classmethod
    def of(cls, draw: Random) -> Drawn:
        """The next of these draws; accepted or not."""
        has_reference, replicas = draw.random() < 0.4, draw.choice([1, 1, 2])
        return cls(
            computes=Computes(
                weights=draw.choice(["model", "model", "int8", "int8_dynamic"]),
                has_adapters=draw.random() < 0.3,
                has_reference=has_reference,
                refreshed=draw.choice(["never", "newest", "average"]) if has_reference else "never",
                every=draw.choice([1, 2]) if has_reference else 1,
            ),
            trainer_ranks=draw.choice([1, 1, 2, 2, 2, 4]),
            trainer_parallel=draw.choice([1, 1, 2]),
            trainer_replicas=draw.choice([1, 1, 2]),
            parallel=draw.choice([1, 1, 1, 2, 2, 4]),
            replicas=replicas,
            references=draw.choice([1, 2]) if has_reference else 1,
            reference_parallel=draw.choice([1, 2, 2, 4]) if has_reference else 1,
            weights=draw.choice([None, "shared_memory", "gloo"]),
            scale={1: {"generator": 3 - replicas}} if draw.random() < 0.3 else {},
            shares=draw.random() < 0.4,
        )

    def graph(self, policy: Path) -> Graph:
        """The graph itself, with what its operators say of their ranks."""
        what, g = self.computes, Graph("drawn")
        model = Model(str(policy), lora=LoRA(rank=4) if what.has_adapters else None)
        generator = Generator(
            model,
            group_size=GROUP,
            max_tokens=6,
            segment_tokens=3,
            slots=8,
            weights=what.weights,
            tensor_parallel=self.parallel,
        )
        trainer = Trainer(
            model,
            loss=partial(aipo, rho=4.0),
            prompts_per_step=PROMPTS,
            lr=what.lr,
            eps=1e-3,
            tensor_parallel=self.trainer_parallel,
            dp_replicate=self.trainer_replicas,
        )
        rollouts = generator(
            g.source(Prompts([{"prompt": f"{chr(97 + n)}{n}="} for n in range(STEPS * PROMPTS)]))
        )
        is_adapted = what.has_adapters and what.refreshed != "never"
        reference = Logprobs(
            model if is_adapted else model.frozen(), tensor_parallel=self.reference_parallel
        )
        trainer(
            advantage(closeness(reference(rollouts)) if what.has_reference else reward(rollouts))
        )
        g.feedback(trainer.weights, generator, max_staleness=0)
        if what.refreshed != "never":
            decay = 0.5 if what.refreshed == "average" else 0.0
            g.feedback(trainer.weights.average(decay=decay), reference, every=what.every)
        return g

    def how(self) -> dict[str, Any]:
        """What plan and run are told of it."""
        replicas = {"generator": self.replicas} | (
            {"ref_logprobs": self.references} if self.references > 1 else {}
        )
        return {
            "ranks": {"trainer": self.trainer_ranks},
            "replicas": replicas,
            "weights": self.weights,
            "gpus": "shared" if self.shares else None,
            "scale": {step: dict(wishes) for step, wishes in self.scale.items()},
        }
