"""Trainer: makes steps of a model from groups of rollouts, and offers the new weights; imports no
torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataflow.runtime import Context, Runtime
from operators.training.knobs import TrainerKnobs

if TYPE_CHECKING:
    from dataflow.history.replay import ReplayScript


@dataclass(frozen=True, eq=False)
class Trainer(TrainerKnobs):
    """Trains `model` on groups in the order of their issue, `prompts_per_step` at a time, with
    AdamW.

    Groups whose rollouts all failed, or that are older than the feedback's max_staleness, are
    dropped and counted; so are those of a step whose loss or gradient is not finite, which leaves
    the weights alone.

    Its knobs: `operators.training.knobs.TrainerKnobs`.

    >>> from functools import partial
    >>> from dataflow import Graph, Model
    >>> from operators import Generator, Prompts, Trainer
    >>> from operators.credit import advantage
    >>> from operators.losses import aipo
    >>> from operators.rewards import find
    >>> g, model = Graph("sums"), Model("policies/sums")
    >>> generator = Generator(model, group_size=8, max_tokens=64)
    >>> trainer = Trainer(model, loss=partial(aipo, rho=4.0), prompts_per_step=32, lr=1e-5)
    >>> prompts = Prompts([{"prompt": "2+2=", "answer": "4"}], columns=("answer",))
    >>> trainer(advantage(find("exact")(generator(g.source(prompts)))))
    >>> g.feedback(trainer.weights, generator, max_staleness=4)
    >>> g.check()
    """

    def preload(self) -> None:
        """Import torch, the model's code and the runtime."""
        import operators.training.learner.build
        import operators.training.runtime  # noqa: F401
        from operators.models.loading import preload

        preload(self.model)

    def build(self, context: Context) -> Runtime:
        """Load the model and make the runtime."""
        from operators.training.runtime import TrainerRuntime

        return TrainerRuntime.build(self, context)

    def follower(self, context: Context, settings: Mapping[str, Any]) -> Callable[[int, int], int]:
        """What a rank runs on another host than rank 0's
        (`dataflow.system.rank_places.Spreads`).
        """
        from operators.training.parallel.launch import follower

        return follower(self, context, settings)

    def replay(self, script: "ReplayScript") -> Iterator[Mapping[str, float]]:
        """Train a run's recorded steps again, for `dataflow replay`: `loss` and `grad_norm` of
        each.
        """
        from operators.training.retrain import retrained

        return retrained(self, script)
