"""Makes the learner that a `Trainer` declares: model, optimiser and loss; imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dataflow.errors import Unusable
from dataflow.model import Model
from operators.models.loading import load_adapted, load_model
from operators.training.cpu.direct_gradients import DirectGradients
from operators.training.cpu.products import multiplies_bfloat16
from operators.training.knobs import TrainerKnobs
from operators.training.learner.critic import Critic
from operators.training.learner.learner import Forward, Learner
from operators.training.learner.memory import OffloadedLearner, prepare
from operators.training.learner.optimizer import adamw
from operators.training.learner.policy import Policy


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
    is_rounded = forward.compute is not None
    is_known = not is_rounded or (forward.compute == torch.bfloat16 and multiplies_bfloat16())
    if is_alone and torch.device(device).type == "cpu" and not trainer.compile and is_known:
        learner.direct = forward.direct = DirectGradients(module, is_rounded=is_rounded)
    return learner


def learner_of(
    trainer: TrainerKnobs, forward: Forward, *, node: str, seed: int = 0, aside: Path | None = None
) -> Learner:
    """A learner around a model that is loaded already.

    aside: where it may put away what is in main memory, of one that takes turns on its devices;
    None: it does not.
    """
    prepare(
        forward.module,
        gradient_checkpointing=trainer.gradient_checkpointing,
        compile=trainer.compile,
    )
    learner = Learner(
        forward=forward,
        optimizer=adamw(
            dict(forward.module.named_parameters()),
            lr=trainer.lr,
            betas=trainer.betas,
            eps=trainer.eps,
            weight_decay=trainer.weight_decay,
        ),
        loss=trainer.loss_function,
        node=node,
        normalize=trainer.normalize,
        max_grad_norm=trainer.max_grad_norm,
        micro_batch_tokens=trainer.micro_batch_tokens,
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
