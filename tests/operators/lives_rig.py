"""Lives of one trainer: real model folder, run folder and ledger, and groups from a list; what it
has when it ends.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from rigs.ending import at_end
from rigs.operators import make_context
from trainer_rig import COLUMNS, VOCABULARY, Plane, group, tiny_llama

from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.model import Model
from dataflow.runtime import Batch
from dataflow.staleness import Bound
from operators.trainer import Trainer
from operators.training.learner.build import state_tensors
from operators.training.runtime import TrainerRuntime
from operators.warm_start.train import character_tokenizer

GROUPS = 16


def policy_folder(place: Path) -> Path:
    """A tiny policy with its tokenizer."""
    tiny_llama().save_pretrained(place)
    character_tokenizer("abcdefghijklmnopqrst"[: VOCABULARY - 3], 64).save_pretrained(place)
    return place


def run_folder(place: Path, groups: int = GROUPS) -> RunFolder:
    """A run whose groups are issued already."""
    folder = RunFolder.create(place, "test")
    with Ledger.create(folder.ledger, {"trainer": ["prompts"]}) as ledger:
        ledger.issue("prompts", [(number, f"p{number}") for number in range(groups)])
    return folder


@dataclass
class Said:
    """A log that keeps what was said."""

    lines: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda event, **facts: self.lines.append((event, facts))

    def __contains__(self, event: str) -> bool:
        return any(event in said for said, _ in self.lines)


class TrainerLife:
    """One trainer from its start to its end."""

    def __init__(
        self, folder: RunFolder, trainer: Trainer, *, columns: Any = COLUMNS, **facts: Any
    ) -> None:
        torch.set_num_threads(1)
        self.folder, self.ledger, self.log = folder, Ledger.open(folder.ledger), Said()
        at_end(self.ledger.close)
        self.plane = Plane([])
        self.acks: list[int] = []
        bounds = {"prompts": Bound(max_staleness=100, prompts_per_step=trainer.prompts_per_step)}
        self.context = make_context(
            node="trainer",
            columns={"prompts": columns},
            bounds=bounds,
            folder=folder,
            ledger=self.ledger,
            log=self.log,
            **({"writer": lambda tensors: self.plane} | facts),
        )
        built = trainer.build(self.context)
        assert isinstance(built, TrainerRuntime)
        self.runtime = built

    def push(self, *batches: pa.RecordBatch) -> None:
        """Groups, one by one."""
        for batch in batches:
            self.runtime.push(
                Batch("prompts", batch, "reward", lambda group: self.acks.append(group))
            )

    def work(self) -> Iterator[dict[str, Any]]:
        """Its status after each slice, until it waits for groups or is done."""
        while self.runtime.work() is not None:
            yield self.runtime.status()

    def run(self, numbers: range = range(0)) -> "TrainerLife":
        """Train these groups."""
        self.push(*[group(number) for number in numbers])
        for _ in self.work():
            pass
        return self

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the weights and of the optimiser's state."""
        learner = self.runtime._learner
        held = learner.parameters | state_tensors(learner.optimizer, learner.parameters)
        return {name: tensor.detach().clone() for name, tensor in held.items()}

    def end(self) -> None:
        """As a crash does, but for a checkpoint that is being written."""
        self.runtime.close()
        self.ledger.close()


def declared(policy: Path, **knobs: Any) -> Trainer:
    """A trainer of that policy."""
    model = Model(str(policy), **knobs.pop("model", {}))
    return Trainer(model, **{"prompts_per_step": 2, "lr": 1e-2, "micro_batch_tokens": 24, **knobs})


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
