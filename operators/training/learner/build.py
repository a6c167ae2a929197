"""Makes the learner that a `Trainer` declares: model, optimiser and loss; imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dataflow.errors import Unusable
from dataflow.model import Model
from operators.models.loading import load_adapted, load_model
from operators.trainer import TrainerKnobs
from operators.training.learner.copies import ComputeCopies, adds_up_in_float32
from operators.training.learner.cpu import DirectGradients, multiplies_bfloat16
from operators.training.learner.learner import Forward, Learner
from operators.training.learner.memory import OffloadedLearner, prepare
from operators.training.learner.policy import Critic, Policy
from operators.training.learner.rounded import RoundedAdamW

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def adamw(
    parameters: Mapping[str, Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    moments: torch.dtype = torch.float32,
) -> torch.optim.Optimizer:
    """AdamW in its fused form; weight decay is kept from vectors (norms, biases)."""
    trained = [weight for weight in parameters.values() if weight.requires_grad]
    groups: list[dict[str, Any]] = [
        {
            "params": [weight for weight in trained if weight.ndim >= 2],
            "weight_decay": weight_decay,
        },
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if moments != torch.float32:
        return RoundedAdamW(groups, lr=lr, betas=betas, eps=eps, moments=moments)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def state_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The optimiser's own state as <parameter>/<moment>; empty before its first step."""
    tensors: dict[str, Tensor] = {}
    for name, weight in parameters.items():
        state = optimizer.state.get(weight, {})
        tensors |= {f"{name}/{moment}": state[moment] for moment in MOMENTS if moment in state}
    return tensors


def fresh_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Give the optimiser an empty state to fill, as after a step; returns it as `state_tensors`."""
    for weight in parameters.values():
        if weight.requires_grad:
            step = torch.zeros((), dtype=torch.float32, device=weight.device)
            dtype = optimizer.defaults.get("moments", weight.dtype)
            moments = [torch.zeros_like(weight, dtype=dtype) for _ in MOMENTS[:2]]
            optimizer.state[weight] = dict(zip(MOMENTS, [*moments, step], strict=True))
    return state_tensors(optimizer, parameters)


def check_gradients(node: str) -> None:
    """Raise Unusable where this process cannot compute gradients: a fork has lost the threads that
    compute them.
    """
    try:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise Unusable(
            f"'{node}' cannot train: its process was forked from a program that had computed"
            f" gradients with more than one thread; found: {str(error).splitlines()[0]}; call"
            " run(...) before the program's first backward(), or in a process of its own"
        ) from error


def make_learner(
    trainer: TrainerKnobs,
    model: Model,
    *,
    node: str,
    device: str,
    seed: int = 0,
    aside: Path | None = None,
    is_alone: bool = True,
) -> Learner:
    """Load `model` with float32 weights and put a learner around it; of one with adapters, they
    alone are float32.

    model: the trainer's own, or that of a checkpoint. seed: the run's. aside: as of `learner_of`.
    is_alone: the model is not going to be shared out.
    """
    if model.lora is not None:
        module = load_adapted(model, device=device)
    else:
        module = load_model(model, device=device, dtype="float32")
    forward = forward_of(trainer, module)
    learner = learner_of(trainer, forward, node=node, seed=seed, aside=aside)
    if not is_alone:
        return learner
    compute = forward.compute
    is_known = compute is None or (compute == torch.bfloat16 and multiplies_bfloat16())
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu and not trainer.compile and is_known:
        learner.direct = forward.direct = DirectGradients(module, is_rounded=compute is not None)
    if compute is not None:
        if on_cpu:
            adds_up_in_float32(module)
        learner.copies = ComputeCopies(module, compute, learner.direct or ())
    return learner


def learner_of(
    trainer: TrainerKnobs, forward: Forward, *, node: str, seed: int = 0, aside: Path | None = None
) -> Learner:
    """A learner around a model that is loaded already.

    aside: where it may put away what is in main memory, of one that takes turns on its devices;
    None: it does not.
    """
    training = trainer.traits.training
    prepare(
        forward.module,
        gradient_checkpointing=trainer.gradient_checkpointing or False,
        compile=training.compiled,
    )
    learner = Learner(
        forward=forward,
        optimizer=adamw(
            dict(forward.module.named_parameters()),
            lr=trainer.lr,
            betas=trainer.betas,
            eps=trainer.eps,
            weight_decay=trainer.weight_decay,
            moments=getattr(torch, trainer.moments),
        ),
        loss=trainer.loss_function,
        node=node,
        normalize=trainer.normalize,
        max_grad_norm=trainer.max_grad_norm,
        micro_batch_tokens=training.micro_batch_tokens,
        skip_zero_advantage=trainer.skip_zero_advantage,
        whiten=trainer.whiten,
        seed=seed,
        keep_new_logprobs=trainer.keep_new_logprobs and trainer.model.head == "lm",
    )
    learner.parked = (
        OffloadedLearner(learner, aside) if trainer.offload or aside is not None else None
    )
    return learner


def forward_of(trainer: TrainerKnobs, module: Any) -> Policy | Critic:
    """The module as the learner sees it, by its head."""
    compute = None if trainer.model.dtype == "float32" else getattr(torch, trainer.model.dtype)
    if trainer.model.head == "value":
        return Critic(module, compute=compute)
    return Policy(module, temperature=trainer.temperature, compute=compute)
