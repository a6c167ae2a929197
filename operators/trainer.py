"""`Trainer`: one optimiser step per batch of groups, each prompt trained once. Its knobs and
their faults, and the learning rate by step; imports no torch."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from dataflow.errors import is_number, is_whole
from dataflow.model import DTYPES, Model, holds_adapters
from dataflow.node import (
    CapacityTraits,
    Learn,
    Operator,
    SamplingTraits,
    Split,
    TrainingTraits,
    Traits,
)
from dataflow.records import ERROR, FINISH_REASON, LOGPROBS, MASK, TOKENS, VERSIONS
from dataflow.runtime import Context, Runtime
from dataflow.settable import STEP, Settable, settable, settable_parameters
from operators.losses import aipo
from operators.training.learner.loss_function import WITH_GRADIENT, LossFunction, read_loss

if TYPE_CHECKING:
    from dataflow.history.replay import ReplayScript

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(
    step: int,
    lr: float,
    *,
    warmup_steps: int,
    schedule: str = "constant",
    decay_steps: int | None = None,
    min_lr: float = 0.0,
) -> float:
    """The rate of step 1, 2, ...: it rises linearly over `warmup_steps`, then follows the schedule.

    decay_steps: steps, the warm-up included, until it is at `min_lr`, where it stays; without them
    it is constant.
    """
    if step < warmup_steps:
        return lr * step / warmup_steps
    if schedule == "constant" or decay_steps is None:
        return lr
    done = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    share = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return min_lr + (lr - min_lr) * share


WITHOUT_PLAN: Mapping[str, Any] = {
    "micro_batch_tokens": 8192,
    "gradient_checkpointing": False,
    "compile": False,
}
"""Knobs that a plan may choose, and their values where it does not."""
WAYS: Sequence[Mapping[str, Any]] = [
    {"gradient_checkpointing": recomputes, "micro_batch_tokens": tokens}
    for recomputes, tokens in (
        (False, 8192),
        (False, 4096),
        ("products", 8192),
        (True, 8192),
        (True, 4096),
        (True, 2048),
        ("offload", 8192),
        ("offload", 2048),
    )
]
"""What a plan chooses from, the fastest first."""
NORMALIZE = ("tokens", "rollouts", "rollout_means")
HEADS = {"lm": ("new_logprobs", "entropy"), "value": ("new_values",)}
"""What a model's head gives a loss."""


@dataclass(frozen=True, eq=False)
class TrainerKnobs(Learn):
    """What `operators.Trainer` declares."""

    light: ClassVar[bool] = False

    model: Model
    """The policy."""
    _: KW_ONLY
    loss: Callable[..., Any] = aipo
    """See operators.losses; give knobs with functools.partial."""
    prompts_per_step: int = 32
    """Groups that one optimiser step trains."""
    lr: float = settable(1e-5, at=STEP)
    """Learning rate of AdamW, after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's two moments."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: float = settable(0.0, at=STEP)
    """Of matrices; vectors are not decayed."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    schedule: str = "constant"
    """What it does afterwards: constant, linear or cosine, down to `min_lr` at `decay_steps`."""
    decay_steps: int | None = settable(None, at=STEP)
    """Steps, the warm-up included, until it is at `min_lr`; None: the run's, or what its prompts
    suffice for."""
    min_lr: float = settable(0.0, at=STEP)
    """Where it ends, unless it is constant."""
    max_grad_norm: float = settable(1.0, at=STEP)
    """Gradients above this norm are scaled down to it; inf: never."""
    normalize: str = "tokens"
    """What the summed loss of a step is divided by: its trained tokens, its rollouts, or
    (rollout_means) its rollouts after each one's sum was divided by its own tokens."""
    whiten: bool = False
    """Shift and scale the advantages of a step's trained tokens to mean 0 and deviation 1
    (REINFORCE++)."""
    temperature: float = 1.0
    """That the generator samples at; log-probabilities are taken at the same."""
    micro_batch_tokens: int | None = None
    """Tokens of one forward and backward; prompts that a group has in common count once. None:
    8,192, or on accelerators what the plan finds to fit, as it says."""
    skip_zero_advantage: bool = True
    """Leave out rollouts of advantage 0 where the loss is found to vanish on them; denominators
    stay."""
    tensor_parallel: int = 1
    """Ranks that share out each layer's matrices; divides the trainer's ranks, of which the others
    shard the data."""
    dp_replicate: int = 1
    """Replicas of the model: each shards it over its own ranks alone, and what crosses from one to
    another is the sum of their gradients (HSDP). Times `tensor_parallel` it divides the trainer's
    ranks."""
    gradient_checkpointing: bool | Literal["products", "offload"] | None = None
    """Keep no activations within a layer: compute them again in the backward pass. "products":
    all but what matrices and attention give, as a compiled layer does by itself. "offload": keep
    what goes into layers in main memory. None: where nothing else fits on accelerators, as the plan
    finds."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Type in which AdamW's moments are kept between steps; bfloat16 halves them and changes what
    is learned by their rounding, which is by chance and right in the mean."""
    compile: bool | None = None
    """Run the layers through torch.compile. None: on accelerators, where no rank shares a layer."""
    offload: bool = False
    """Between steps, keep the optimiser's state and the gradients in main memory: for devices that
    are shared."""
    copy_weights: bool | None = None
    """Where ranks send versions to ranks: from copies of the weights, two at most, or, False, from
    the weights, so that an update waits until those who are taking them have them; None: copies
    only where nodes take turns on devices, where `offload` moves weights, and where what changed is
    sent. A trainer of one rank, whose readers on its machine compute in memory that it writes, has
    no other copy."""
    checkpoint_every: int | None = settable(None, at=STEP)
    """Steps between checkpoints that stay; the last step is always kept."""
    save_total_limit: int | None = None
    """Of the checkpoints of `checkpoint_every` so many stay, the newest; None: all. Beside them
    stay the last step's, those that were asked for, and with keep_steps two at most with which a
    replay of the last steps begins."""
    checkpoint_dtype: str | None = None
    """Type of the weights in a checkpoint's files, as "float32"; None: the one that the model came
    in. Where that is rounder than the trainer's float32, its own weights stand beside the
    optimiser's state, and a resume goes on from them."""
    recover_within_s: float = 60.0
    """Seconds of steps after which a checkpoint to recover from is left, beside those of
    `checkpoint_every`; it goes when the next one is committed. At least 20 times as long as a
    checkpoint takes; inf: never."""
    keep_new_logprobs: bool = True
    """Keep the log-probabilities that it computes of each trained token in the step's file of
    rollouts, as column `new_logprobs`: 4 bytes a token."""
    queue_prompts: int | None = None
    """Groups it holds beside those of the step under way; None: as many as the feedback lets be in
    flight."""

    @property
    def step_prompts(self) -> int:
        """Groups that one step consumes."""
        return self.prompts_per_step

    @property
    def traits(self) -> Traits:
        """What graphs are checked for, and what a rank takes."""
        return Traits(
            split=Split(tensor_parallel=self.tensor_parallel, dp_replicate=self.dp_replicate),
            sampling=SamplingTraits(temperature=self.temperature),
            capacity=CapacityTraits(queue_prompts=self.queue_prompts),
            training=TrainingTraits(
                micro_batch_tokens=self.micro_batch_tokens or WITHOUT_PLAN["micro_batch_tokens"],
                gradient_checkpointing=self.gradient_checkpointing in (True, "offload"),
                keeps_products=self.gradient_checkpointing == "products",
                inputs_in_host=self.gradient_checkpointing == "offload",
                moment_bytes=2 if self.moments == "bfloat16" else 4,
                compiled=bool(self.compile),
                offloads=self.offload,
                copies_weights=self.offload or self.copy_weights,
                compares_logprobs=LOGPROBS in self.loss_function.columns,
                begins_early=not (self.whiten or self.offload),
            ),
            sleeps=True,
            ways=self._ways,
        )

    @property
    def _ways(self) -> tuple[Mapping[str, Any], ...]:
        """See `Traits.ways`: fewer tokens at once before layers are computed again."""
        wished = {knob: getattr(self, knob) for knob in WITHOUT_PLAN}
        compiles = self.tensor_parallel == 1 if self.compile is None else self.compile
        ways = [
            {
                knob: value
                for knob, value in (("compile", compiles), *way.items())
                if wished[knob] is None
            }
            for way in WAYS
            if not (compiles and way["gradient_checkpointing"] == "products")
        ]
        return tuple(way for at, way in enumerate(ways) if way and way not in ways[:at])

    def settled(self, chosen: Mapping[str, Any]) -> Self:
        """The declaration with a value for each knob: that which the plan chose, where it is left
        to the plan.
        """
        values = {**WITHOUT_PLAN, **chosen}
        lacking = {knob: value for knob, value in values.items() if getattr(self, knob) is None}
        return replace(self, **lacking) if lacking else self

    @cached_property
    def loss_function(self) -> LossFunction:
        """The loss's columns and knobs."""
        return read_loss(self.loss, self.name)

    def knobs(self) -> dict[str, Any]:
        """Knobs that differ from their defaults, the loss by its name and its own knobs."""
        shown = super().knobs()
        if "loss" in shown:
            loss_knobs = getattr(self.loss, "keywords", {})
            inside = ", ".join(f"{knob}={value!r}" for knob, value in loss_knobs.items())
            shown["loss"] = (
                f"{self.loss_function.name}({inside})" if inside else self.loss_function.name
            )
        return shown

    def settable(self) -> Mapping[str, Settable]:
        """Its own that may change, and the loss's."""
        return {**self.settable_of_loss(), **super().settable()}

    def settable_of_loss(self) -> Mapping[str, Settable]:
        """The loss's knobs that are numbers or texts, but for names of its own."""
        loss, own = self.loss_function, super().settable()
        annotations = getattr(getattr(loss.call, "func", loss.call), "__annotations__", {})
        settable = settable_parameters(loss.knobs, annotations, STEP)
        return {name: setting for name, setting in settable.items() if name not in own}

    def _with(self, knob: str, value: Any) -> Self:
        if knob in super().settable():
            return super()._with(knob, value)
        return replace(self, loss=functools.partial(self.loss, **{knob: value}))

    def at_temperature(self, temperature: float) -> Operator:
        """Of rows that say nothing else it takes log-probabilities at that one."""
        return replace(self, temperature=temperature)

    def reads(self) -> Mapping[str, Any]:
        """The rollout's columns and those that the loss names."""
        columns: dict[str, Any] = dict.fromkeys(self.loss_function.columns, np.ndarray)
        return columns | {
            TOKENS: list[int],
            MASK: list[bool],
            LOGPROBS: list[float],
            VERSIONS: list[int],
            FINISH_REASON: str,
            ERROR: str,
        }

    def faults(self) -> list[str]:
        """Knobs that cannot be right."""
        faults = list(self.loss_function.faults)
        for knob, least in (
            ("prompts_per_step", 1),
            ("warmup_steps", 0),
            ("tensor_parallel", 1),
            ("dp_replicate", 1),
        ):
            faults += self._whole(knob, getattr(self, knob), least)
        for knob in (
            "micro_batch_tokens",
            "checkpoint_every",
            "queue_prompts",
            "decay_steps",
            "save_total_limit",
        ):
            if getattr(self, knob) is not None:
                faults += self._whole(knob, getattr(self, knob), 1)
        for knob, zero_is_fine in (
            ("lr", True),
            ("eps", False),
            ("weight_decay", True),
            ("min_lr", True),
            ("temperature", False),
        ):
            value = getattr(self, knob)
            if not (
                is_number(value)
                and math.isfinite(value)
                and (value > 0 or (zero_is_fine and value == 0))
            ):
                faults.append(
                    f"'{self.name}' has {knob}={value!r}; give a number above"
                    f" 0{' or 0' * zero_is_fine}"
                )
        if self.gradient_checkpointing not in (None, False, True, "products", "offload"):
            faults.append(
                f"'{self.name}' got gradient_checkpointing={self.gradient_checkpointing!r}, which"
                ' is not known; use True, "products", "offload" or False'
            )
        if self.gradient_checkpointing == "products" and self.compile:
            faults.append(
                f"'{self.name}' got gradient_checkpointing='products' and compile=True, whose"
                " layers keep products alone by themselves; leave one of them out"
            )
        if self.moments not in ("float32", "bfloat16"):
            faults.append(
                f"'{self.name}' got moments={self.moments!r}, which it cannot keep; use"
                ' "float32" or "bfloat16"'
            )
        for knob in ("max_grad_norm", "recover_within_s"):
            value = getattr(self, knob)
            if not (is_number(value) and value > 0):
                faults.append(f"'{self.name}' has {knob}={value!r}; give a number above 0, or inf")
        if not (
            isinstance(self.betas, tuple | list)
            and len(self.betas) == 2
            and all(is_number(beta) and 0 <= beta < 1 for beta in self.betas)
        ):
            faults.append(
                f"'{self.name}' has betas={self.betas!r}; give two numbers from 0 up to 1, as (0.9,"
                " 0.999)"
            )
        if self.save_total_limit is not None and self.checkpoint_every is None:
            faults.append(
                f"'{self.name}' has save_total_limit={self.save_total_limit!r} and no"
                " checkpoint_every, which makes what is limited; give both, or neither"
            )
        if self.offload and self.copy_weights is False:
            faults.append(
                f"'{self.name}' has copy_weights=False, which sends its weights from where they"
                " are, and offload=True, which takes them away between steps; leave one of"
                " them out"
            )
        if self.checkpoint_dtype not in (None, *DTYPES):
            faults.append(
                f"'{self.name}' has checkpoint_dtype={self.checkpoint_dtype!r}, which is not known;"
                f" use {list(DTYPES)}"
            )
        if self.normalize not in NORMALIZE:
            faults.append(
                f"'{self.name}' has normalize={self.normalize!r}, which is not known; use"
                f" {list(NORMALIZE)}"
            )
        if self.schedule not in SCHEDULES:
            faults.append(
                f"'{self.name}' has schedule={self.schedule!r}, which is not known; use"
                f" {list(SCHEDULES)}"
            )
        if (
            self.queue_prompts is not None
            and not faults
            and self.queue_prompts < self.prompts_per_step
        ):
            faults.append(
                f"'{self.name}' may queue {self.queue_prompts} prompts but one of its steps needs"
                f" {self.prompts_per_step}: this would deadlock; raise queue_prompts or lower"
                " prompts_per_step"
            )
        if isinstance(self.model, Model):
            gives = HEADS.get(self.model.head)
            if gives is None:
                faults.append(
                    f"'{self.name}' trains next-token logits or values, but model"
                    f" '{self.model.name}' has head '{self.model.head}'; give a Model with"
                    " head='lm', or 'value' for a critic"
                )
            elif wrong := [
                name
                for name in WITH_GRADIENT
                if name in self.loss_function.computed and name not in gives
            ]:
                faults.append(
                    f"loss '{self.loss_function.name}' of '{self.name}' reads '{wrong[0]}', but"
                    f" model '{self.model.name}' has head '{self.model.head}', which gives"
                    f" {list(gives)}; give another loss, or a Model with another head"
                )
            if self.model.dtype == "float16":
                faults.append(
                    f"'{self.name}' trains '{self.model.name}' with dtype 'float16', whose"
                    " gradients overflow; use 'bfloat16' or 'float32'"
                )
            if self.model.lora is None and holds_adapters(self.model.source):
                faults.append(
                    f"'{self.name}' trains all weights of '{self.model.name}', but"
                    f" {self.model.source} holds adapters alone; give Model(..., lora=LoRA()) to go"
                    " on with these, or merge them with peft and give the folder of the whole"
                    " model"
                )
        else:
            faults.append(
                f"'{self.name}' trains {self.model!r}, which is no Model; give"
                " Model('path/to/folder')"
            )
        return faults

    def _whole(self, knob: str, value: Any, least: int) -> list[str]:
        if is_whole(value, least):
            return []
        return [f"'{self.name}' has {knob}={value!r}; give a whole number of {least} or more"]


@dataclass(frozen=True, eq=False)
class Trainer(TrainerKnobs):
    """Trains `model` on groups in the order of their issue, `prompts_per_step` at a time, with
    AdamW.

    Groups whose rollouts all failed, or that are older than the feedback's max_staleness, are
    dropped and counted; so are those of a step whose loss or gradient is not finite, which leaves
    the weights alone.

    Its knobs: `operators.trainer.TrainerKnobs`.

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

        return TrainerRuntime.build(self.settled(context.devices.chosen), context)

    def follower(self, context: Context, settings: Mapping[str, Any]) -> Callable[[int, int], int]:
        """What a rank runs on another host than rank 0's
        (`dataflow.system.rank_places.Spreads`).
        """
        from operators.training.parallel.launch import follower

        return follower(self.settled(context.devices.chosen), context, settings)

    def replay(self, script: "ReplayScript") -> Iterator[Mapping[str, float]]:
        """Train a run's recorded steps again, for `dataflow replay`: `loss` and `grad_norm` of
        each.
        """
        from operators.training.retrain import retrained

        return retrained(self, script)
