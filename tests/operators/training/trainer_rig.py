"""What the trainer's tests share: a tiny policy, groups of rollouts, fakes for what a trainer
touches.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from rigs.columns import whole
from rigs.operators import make_context
from transformers import LlamaConfig, LlamaForCausalLM

from dataflow.model import Model
from dataflow.records import PROMPT_COLUMNS, ROLLOUT_COLUMNS, schema
from dataflow.runtime import Batch
from dataflow.staleness import Bound
from operators.trainer import Trainer
from operators.training.learner.build import learner_of
from operators.training.learner.learner import Learner
from operators.training.learner.policy import Policy
from operators.training.learner.rows import StepRows, step_rows
from operators.training.runtime import TrainerRuntime

VOCABULARY = 23
COLUMNS = {**PROMPT_COLUMNS, **ROLLOUT_COLUMNS, "reward": pa.float64(), "advantage": pa.float64()}


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A Llama with two layers and grouped queries."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def group(
    group_id: int,
    *,
    size: int = 3,
    seed: int | None = None,
    version: int = 0,
    error: str | None = None,
    advantages: list[float] | None = None,
    logprobs: float | None = None,
    completion: int = 6,
) -> pa.RecordBatch:
    """The rollouts of one prompt: 2 to 6 prompt tokens in common, completions of 1 to `completion`
    tokens.
    """
    draw = np.random.default_rng(group_id if seed is None else seed)
    prompt = draw.integers(2, VOCABULARY, int(draw.integers(2, 7))).tolist()
    rewards = draw.integers(0, 2, size).astype(float)
    given = (rewards - rewards.mean()).tolist() if advantages is None else advantages
    rows = []
    for position in range(size):
        new = draw.integers(1, VOCABULARY, int(draw.integers(1, completion + 1))).tolist()
        recorded = (
            (-3.0 * draw.random(len(new))).tolist() if logprobs is None else [logprobs] * len(new)
        )
        rows.append(
            {
                "group_id": group_id,
                "prompt_id": f"p{group_id}",
                "prompt": "?",
                "group_size": size,
                "min_version": 0,
                "round_size": 0,
                "rollout_id": group_id * size + position,
                "position": position,
                "completion": "!",
                "tokens": prompt + new,
                "mask": [False] * len(prompt) + [True] * len(new),
                "logprobs": [0.0] * len(prompt) + recorded,
                "versions": [-1] * len(prompt) + [version] * len(new),
                "finish_reason": "error" if error else "stop",
                "error": error,
                "reward": None if error else rewards[position],
                "advantage": None if error else given[position],
            }
        )
    return pa.RecordBatch.from_pylist(rows, schema=schema(COLUMNS))


def rows_of(
    *groups: pa.RecordBatch, columns: tuple[str, ...] = ("logprobs", "advantage")
) -> StepRows:
    """The groups as a step's rows."""
    return step_rows(groups, columns)


def tiny_trainer(**knobs: Any) -> Trainer:
    """A declaration with small numbers; the model is never loaded from its name."""
    return Trainer(Model("tiny"), **{"prompts_per_step": 2, "lr": 1e-2, **knobs})


def tiny_learner(trainer: Trainer, module: Any = None, *, packed: bool | None = None) -> Learner:
    """The learner that the trainer would build, around a tiny policy."""
    module = module if module is not None else tiny_llama()
    return learner_of(
        trainer, Policy(module, temperature=trainer.temperature, packed=packed), node="trainer"
    )


def gradient(learner: Learner, rows: StepRows) -> tuple[float, torch.Tensor, float]:
    """Loss, flat gradient before clipping, and its norm, of one step that leaves the weights
    alone.
    """
    for part in learner.begin(rows, 0):
        learner.micro(part)
    learner.max_grad_norm = float("inf")
    outcome = learner.end(0.0)
    flat = torch.cat([weight.grad.flatten() for weight in learner.parameters.values()])
    return outcome.loss, flat.clone(), outcome.grad_norm


def reference_logprobs(module: Any, tokens: list[int], mask: list[bool]) -> torch.Tensor:
    """Log-probabilities of one rollout's chosen tokens, by the model's own attention, without
    packing.
    """
    logits = module(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    chosen = [at for at in range(1, len(tokens)) if mask[at]]
    return torch.stack([logits[at - 1, tokens[at]] for at in chosen])


@dataclass
class Clock:
    """Seconds that pass only when it is read: one per reading."""

    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@dataclass
class Plane:
    """A weight plane that writes down what it is told, and a copy of what is published."""

    events: list[Any]
    published: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    notes: list[Mapping[str, Any]] = field(default_factory=list)
    sent: dict[str, Any] = field(default_factory=dict)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        self.published[version] = {name: tensor.clone() for name, tensor in tensors.items()}
        self.events.append(("publish", version))
        return True

    def settle(self, timeout_s: float) -> bool:
        return True

    def tell(self, note: Mapping[str, Any]) -> None:
        self.notes.append(dict(note))

    def poll(self) -> None:
        pass


@dataclass
class FakeCheckpoints:
    """Checkpoints that only remember what was asked of them."""

    path: Path
    events: list[Any]

    def folder(self, step: int) -> Path:
        return self.path / f"step-{step:06d}"

    @contextlib.contextmanager
    def writing(self, step: int, **facts: Any) -> Iterator[Path]:
        self.folder(step).mkdir()
        yield self.folder(step)
        self.events.append(("checkpoint", step))

    def keep(self, step: int) -> bool:
        return False

    def clear(self, before: int, but: Collection[int] = ()) -> None:
        pass


@dataclass
class FakeRollouts:
    """Those of a folder that only remembers."""

    folder: "FakeFolder"

    def flush(self, steps: Iterable[int]) -> None:
        self.folder.events.append(("flush rollouts", *steps))

    def write(self, step: int, rows: pa.Table | list[pa.RecordBatch]) -> None:
        batches = rows.to_batches() if isinstance(rows, pa.Table) else rows
        self.folder.rollouts[step] = [batch.column("group_id")[0].as_py() for batch in batches]
        self.folder.files[step] = pa.Table.from_batches(batches)
        self.folder.events.append(("rollouts", step))

    def write_evaluation(self, step: int, table: pa.Table) -> None:
        self.folder.evaluations[step] = table
        self.folder.events.append(("evaluation", step))


@dataclass
class FakeFolder:
    """A run folder that only remembers."""

    path: Path
    events: list[Any]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    rollouts: dict[int, list[int]] = field(default_factory=dict)
    files: dict[int, pa.Table] = field(default_factory=dict)
    evaluations: dict[int, pa.Table] = field(default_factory=dict)

    def checkpoints_of(self, node: str | None) -> FakeCheckpoints:
        return FakeCheckpoints(self.path, self.events)

    def rollouts_of(self, node: str | None = None) -> FakeRollouts:
        return FakeRollouts(self)

    def append_metrics(self, line: dict[str, Any]) -> None:
        self.metrics.append(line)
        self.events.append(("metrics", line["step"]))


@dataclass
class FakeLedger:
    """A ledger that only remembers; a new run."""

    events: list[Any]
    steps: dict[int, tuple[list[int], dict[int, str]]] = field(default_factory=dict)
    drops: dict[int, str] = field(default_factory=dict)
    evaluations: dict[int, list[int]] = field(default_factory=dict)

    def last_step(self, node: str) -> int:
        return 0

    def last_round(self, node: str) -> int | None:
        return max(self.evaluations, default=None)

    def next_group_id(self, source: str) -> int:
        return 0

    def in_flight(self, source: str, node: str) -> list[Any]:
        return []

    def drops_at(self, node: str, step: int) -> dict[int, str]:
        return {}

    def commit_step(
        self,
        node: str,
        step: int,
        *,
        version: int,
        source: str,
        trained: list[int],
        dropped: dict[int, str],
        metrics: Mapping[str, Any],
        checkpoint: str | None = None,
    ) -> None:
        self.steps[step] = (list(trained), dict(dropped))
        self.events.append(("ledger", step))

    def drop(
        self, node: str, source: str, reasons: Mapping[int, str], *, step: int | None = None
    ) -> None:
        self.drops |= dict(reasons)

    def commit_round(self, node: str, step: int, groups: Mapping[str, list[int]]) -> None:
        for ids in groups.values():
            self.evaluations.setdefault(step, []).extend(ids)
        self.events.append(("ledger", step))

    def record_checkpoint(self, node: str, step: int, checkpoint: str | None) -> None:
        self.events.append(("recorded", step))

    @property
    def wal_bytes(self) -> int:
        return 0

    def flush(self) -> None:
        self.events.append(("flush",))


class Tokenizer:
    """Saves nothing but its name."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@dataclass
class Rig:
    """A trainer's runtime among fakes."""

    runtime: TrainerRuntime
    events: list[Any]
    plane: Plane
    folder: "FakeFolder"
    ledger: FakeLedger
    acks: list[int] = field(default_factory=list)

    def push(self, *groups: pa.RecordBatch) -> None:
        """One batch of whole groups; its ack is written down by the first group's id."""
        table = pa.Table.from_batches(groups).combine_chunks()
        first = groups[0].column("group_id")[0].as_py()
        (rows,) = table.to_batches()
        self.runtime.push(
            Batch("prompts", rows, "reward", whole(rows, lambda: self.acks.append(first)))
        )

    def run(self) -> None:
        """Work until there is nothing to do."""
        while self.runtime.work() is not None:
            pass


def rig(
    tmp_path: Path,
    trainer: Trainer | None = None,
    *,
    steps: int | None = None,
    max_staleness: int | None = 1,
    module: Any = None,
    packed: bool | None = None,
) -> Rig:
    """A runtime around a tiny policy, with fakes for all it touches."""
    trainer = trainer or tiny_trainer()
    events: list[Any] = []
    plane, folder, ledger = Plane(events), FakeFolder(tmp_path, events), FakeLedger(events)
    bounds = {}
    if max_staleness is not None:
        bound = Bound(
            max_staleness=max_staleness, prompts_per_step=trainer.prompts_per_step, steps=steps
        )
        bounds = {"prompts": bound}
    context = make_context(
        node="trainer",
        steps=steps,
        columns={"prompts": COLUMNS},
        bounds=bounds,
        clock=Clock(),
        folder=folder,
        ledger=ledger,
        writer=lambda tensors: plane,  # type: ignore[arg-type]
    )
    runtime = TrainerRuntime(
        trainer, context, tiny_learner(trainer, module, packed=packed), Tokenizer()
    )
    return Rig(runtime, events, plane, folder, ledger)
