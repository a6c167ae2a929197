"""What the day on eight GPUs runs, and what each figure has to be: written down before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from bench.gpu.systems import TINY, Shape
from bench.report import Figure

GOAL = "goal of the project"
GIB = 2**30

QWEN_7B = Shape(
    family="Qwen2Config",
    sizes={
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
)
"""Qwen2.5-7B's sizes, from its public config.json."""
QWEN_30B_A3B = Shape(
    family="Qwen3MoeConfig",
    sizes={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
)
"""Qwen3-30B-A3B's sizes, from its public config.json."""
TINY_MOE = Shape(
    family="Qwen3MoeConfig",
    sizes={
        **TINY["tiny"].sizes,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a figure has to be."""

    figure: str
    relation: Literal["<=", ">=", "=="]
    value: float
    source: str
    """Where the value is from."""
    anywhere: bool = False
    """Whether it holds on any machine, as in a rehearsal."""

    def verdict(self, figures: Mapping[str, Figure]) -> str:
        """holds, misses, or why neither can be said."""
        figure = figures.get(self.figure)
        if not isinstance(figure, (int, float)):
            return "not measured"
        holds = {
            "<=": figure <= self.value,
            ">=": figure >= self.value,
            "==": figure == self.value,
        }
        return "holds" if holds[self.relation] else "misses"

    def __str__(self) -> str:
        return f"{self.figure} {self.relation} {self.value:g} ({self.source})"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One graph, run from its start to its end: asynchronous GRPO with random weights, whose
    rollouts are all as long as they may be.
    """

    name: str
    minutes: float
    """After which it is given up."""
    shape: Shape = QWEN_7B
    trainer_ranks: int = 4
    trainer_tensor_parallel: int = 1
    replicas: int = 4
    """Of the generator."""
    tensor_parallel: int = 1
    """Ranks of each replica."""
    engine: Literal["native", "vllm"] = "native"
    executor: str | None = None
    """Of the weight plane; None: as the plan chooses."""
    lora_rank: int = 0
    """Of adapters that are trained in place of the weights; 0: the weights are."""
    max_staleness: int = 4
    steps: int = 20
    """Those that count."""
    warm: int = 5
    """Steps before the first that counts."""
    prompts_per_step: int = 16
    group_size: int = 8
    prompt_tokens: int = 200
    max_tokens: int = 512
    bounds: tuple[Bound, ...] = field(default=())

    @property
    def total_steps(self) -> int:
        """Of the run: at its end the generator has nothing left to do for some."""
        return self.warm + self.steps + self.max_staleness + 1

    @property
    def gpus(self) -> int:
        """That it takes."""
        return self.trainer_ranks + self.replicas * self.tensor_parallel


CLEAN = (
    Bound(figure="clean", relation="==", value=1, source="a run loses nothing", anywhere=True),
    Bound(
        figure="staleness_over",
        relation="<=",
        value=0,
        source="max_staleness of the graph",
        anywhere=True,
    ),
)
QUICK = (
    Bound(figure="weights_s", relation="<=", value=0.2, source="arithmetic: 15.2 GB over NVLink"),
    Bound(figure="held_ms", relation="<=", value=5, source=GOAL),
    Bound(figure="settle_s", relation="<=", value=0.2, source="arithmetic: one exchange"),
    Bound(figure="peak_gib", relation="<=", value=78, source="memory of an H100"),
)
BUSY = (Bound(figure="efficiency", relation=">=", value=0.95, source=GOAL),)
REPLAYED = (Bound(figure="replayed_share", relation=">=", value=0.95, source=GOAL),)

STAGES = (
    Stage(
        name="weights-cuda_ipc",
        minutes=4,
        executor="cuda_ipc",
        steps=10,
        bounds=(*CLEAN, *QUICK),
    ),
    Stage(name="weights-nccl", minutes=4, executor="nccl", steps=10, bounds=(*CLEAN, *QUICK)),
    Stage(name="grpo-7b", minutes=10, steps=190, bounds=(*CLEAN, *QUICK, *BUSY, *REPLAYED)),
    Stage(name="grpo-7b-vllm", minutes=6, engine="vllm", steps=40, bounds=(*CLEAN, *QUICK, *BUSY)),
    Stage(
        name="tp4-fsdp2xtp2",
        minutes=5,
        trainer_tensor_parallel=2,
        replicas=1,
        tensor_parallel=4,
        bounds=(*CLEAN, *QUICK, *REPLAYED),
    ),
    Stage(
        name="moe-30b-a3b",
        minutes=8,
        shape=QWEN_30B_A3B,
        lora_rank=16,
        steps=10,
        replicas=2,
        tensor_parallel=2,
        bounds=CLEAN,
    ),
)


def rehearsed(stage: Stage) -> Stage:
    """The same on two processes and two, small, over gloo: the way of the stage, not its size."""
    return replace(
        stage,
        shape=TINY_MOE if stage.shape is QWEN_30B_A3B else TINY["tiny"],
        trainer_ranks=2,
        trainer_tensor_parallel=min(2, stage.trainer_tensor_parallel),
        replicas=min(2, stage.replicas),
        tensor_parallel=min(2, stage.tensor_parallel),
        executor=None if stage.executor is None else "gloo",
        max_staleness=1,
        steps=2,
        warm=1,
        prompts_per_step=2,
        group_size=2,
        prompt_tokens=4,
        max_tokens=8,
        minutes=2,
        bounds=tuple(bound for bound in stage.bounds if bound.anywhere),
    )


def verdicts(stage: Stage, figures: Mapping[str, Figure]) -> Sequence[tuple[Bound, str]]:
    """Each bound of the stage and what came of it."""
    return [(bound, bound.verdict(figures)) for bound in stage.bounds]
