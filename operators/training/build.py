"""Makes the learner that a `Trainer` declares: model, optimiser and loss; imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dataflow.model import Model
from operators.models import load_model
from operators.training.learner import Forward, Learner
from operators.training.optimizer import adamw
from operators.training.policy import Policy

if TYPE_CHECKING:
    from operators.trainer import Trainer


def make_learner(trainer: Trainer, model: Model, *, node: str, device: str) -> Learner:
    """Load `model` with float32 weights and put a learner around it.

    model: the trainer's own, or that of a checkpoint."""
    module = load_model(model, device=device, dtype="float32")
    return learner_of(trainer, forward_of(trainer, module), node=node)


def learner_of(trainer: Trainer, forward: Forward, *, node: str) -> Learner:
    """A learner around a model that is loaded already."""
    return Learner(
        forward=forward,
        optimizer=adamw(
            dict(forward.module.named_parameters()),
            lr=trainer.lr, betas=trainer.betas, eps=trainer.eps, weight_decay=trainer.weight_decay,
        ),
        loss=trainer.loss_function,
        node=node,
        normalize=trainer.normalize,
        max_grad_norm=trainer.max_grad_norm,
        micro_batch_tokens=trainer.micro_batch_tokens,
        skip_zero_advantage=trainer.skip_zero_advantage,
        whiten=trainer.whiten,
    )  # fmt: skip


def forward_of(trainer: Trainer, module: Any) -> Forward:
    """The module as the learner sees it, by its head."""
    compute = None if trainer.model.dtype == "float32" else getattr(torch, trainer.model.dtype)
    return Policy(module, temperature=trainer.temperature, compute=compute)
