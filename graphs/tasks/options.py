"""The flags of trainers and generators that every graph over text files has: knobs of the
operators, by their names.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from dataflow import GraphError, LoRA
from operators.losses import with_entropy, with_kl


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """How the trainers make a step; each field is a knob of `operators.Trainer`."""

    heading: ClassVar[str] = "training"

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up; linear and cosine fall to --min-lr over
    --steps or --epochs."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    min_lr: float = 0.0
    """Learning rate at the end of a schedule that falls."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's two moments."""
    weight_decay: float = 0.0
    """AdamW's, of matrices."""
    max_grad_norm: float = 1.0
    """Gradients above this norm are scaled down to it; inf: never."""
    micro_batch_tokens: int | None = None
    """Tokens of one forward and backward; less takes less memory. 8,192, or what fits into
    accelerators, when left out."""
    gradient_checkpointing: bool | None = None
    """Keep no activations within a layer, compute them again: less memory, a third more time. Where
    nothing else fits when left out."""
    offload: bool = False
    """Between steps, keep the optimiser's state in main memory: for devices that are shared."""
    checkpoint_every: int | None = None
    """Steps between checkpoints that stay; the last step's alone when left out."""
    save_total_limit: int | None = None
    """Of those of --checkpoint-every so many stay, the newest; all when left out."""

    @property
    def reading(self) -> dict[str, Any]:
        """The knobs of what reads rollouts beside the trainer."""
        tokens = self.micro_batch_tokens
        return {} if tokens is None else {"micro_batch_tokens": tokens}

    @property
    def training(self) -> dict[str, Any]:
        """The same as knobs."""
        if self.save_total_limit is not None and self.checkpoint_every is None:
            raise _without("--save-total-limit", self.save_total_limit, "--checkpoint-every")
        if self.min_lr and self.schedule == "constant":
            raise _without("--min-lr", self.min_lr, "--schedule linear or cosine")
        return {field.name: getattr(self, field.name) for field in fields(TrainingFlags)}


@dataclass(frozen=True, kw_only=True)
class GenerationFlags:
    """How the generator samples and computes; each field is a knob of `operators.Generator`."""

    heading: ClassVar[str] = "generation"

    temperature: float = 1.0
    """Divides the logits; 0: always the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability; 1: all."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the likeliest; 0: all."""
    engine: Literal["native", "vllm"] = "native"
    """Who makes the forward passes: this project's engine, or vLLM, which is installed apart."""
    generator_weights: Literal["model", "int8", "int8_dynamic", "fp8"] = "model"
    """How its linear layers compute: as the model; int8 (half of bfloat16's memory), int8_dynamic
    (inputs too); fp8."""
    slots: int = 256
    """Rollouts that are decoded together, at most."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The same as knobs."""
        knobs = {field.name: getattr(self, field.name) for field in fields(GenerationFlags)}
        return {"weights": knobs.pop("generator_weights"), **knobs}


@dataclass(frozen=True, kw_only=True)
class AdapterFlags:
    """Low-rank adapters that are trained in place of the policy's weights, as `dataflow.LoRA` has
    them.
    """

    heading: ClassVar[str] = "LoRA: adapters in place of all weights"

    lora: bool = False
    """Train low-rank adapters of the policy alone; so do the flags below."""
    lora_rank: int | None = None
    """Their rank; 16, or as a folder of adapters has it, when left out."""
    lora_alpha: float | None = None
    """Over the rank: what they are multiplied by; 32 when left out."""
    lora_targets: tuple[str, ...] | None = None
    """Last names of the linear layers that have one, as q_proj v_proj; all but the output layer
    when left out."""

    @property
    def adapters(self) -> LoRA | None:
        """None: all weights are trained."""
        all_knobs = {"rank": self.lora_rank, "alpha": self.lora_alpha, "targets": self.lora_targets}
        knobs: dict[str, Any] = {
            knob: value for knob, value in all_knobs.items() if value is not None
        }
        return LoRA(**knobs) if knobs or self.lora else None


def penalized(
    loss: Callable[..., Any], *, kl: float = 0.0, corrected: bool = False, entropy: float = 0.0
) -> Any:
    """The loss plus `kl` for each nat from the reference, minus `entropy` for each of the policy's
    entropy; 0: without.

    corrected: as `with_kl` has it.
    """
    loss = with_kl(loss, kl, corrected=corrected) if kl else loss
    return with_entropy(loss, entropy) if entropy else loss


def refuse_idle(task: Any, names: tuple[str, ...], why: str) -> None:
    """Refuse flags of a task that would do nothing in its graph, where they are not as they are by
    themselves.

    Errors: GraphError, which names the first.
    """
    for field in fields(task):
        if field.name in names and (value := getattr(task, field.name)) != field.default:
            raise GraphError(
                f"--{field.name.replace('_', '-')} {value} would have no effect: {why}; leave"
                " it out"
            )


def _without(flag: str, value: object, name: str) -> GraphError:
    return GraphError(f"{flag} {value} would have no effect without {name}; give both, or neither")
