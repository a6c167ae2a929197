"""One optimiser step by each system of the trainer bench, over its own copy of the same policy.

All compute AIPO's loss as the mean over the step's trained tokens (importance weight capped at 4),
clip the gradient's norm at 1 and make one fused AdamW step, in float32. What is timed of each, from
rows or tensors that lie ready:

packed     what a Trainer does between the last group's arrival and the new weights: from Arrow rows
           to flat arrays, micro-batches of Trainer's default size, token trees, forward, backward,
           diagnostics, clip, update.
unshared   the same, every rollout with a prompt of its own.
padded     a plain loop over tensors: rows as wide as the longest, `rows` of them per forward and
           backward.
trl        GRPOTrainer.training_step with loss_type="cispo", which is the same loss, on inputs as
           its own generation leaves them (prompts padded at the left, completions at the right),
           then its clipping and its optimiser's step. No generation, no gradient checkpointing, no
           logging; `rows` of them per forward and backward.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.trainer.batches import Padded, Rollouts, as_groups, as_padded
from operators.losses import aipo

RHO, CLIP, LR = 4.0, 1.0, 1e-5
SYSTEMS = ("packed", "unshared", "padded", "trl")


@dataclass(frozen=True)
class System:
    """A policy that can make a step."""

    step: Callable[[], None]
    module: torch.nn.Module
    """Its gradients are those of the last step, clipped."""
    computed: int
    """Positions that go through the model in a step, padding among them."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all systems get."""

    policy: Path
    rollouts: Rollouts
    rows: int
    """Rollouts of one forward and backward of the padded systems."""


def gradient(system: System) -> Tensor:
    """The last step's, flat, scaled to norm 1."""
    gradients = [
        weight.grad
        for _, weight in sorted(system.module.named_parameters())
        if weight.grad is not None
    ]
    flat = torch.cat([grad.flatten() for grad in gradients])
    return flat / flat.norm()


def packed(setting: Setting, *, share: bool = True) -> System:
    """The learner that a Trainer makes."""
    from dataflow import Model
    from operators import Trainer
    from operators.training.learner import learner as learning
    from operators.training.learner.build import make_learner
    from operators.training.learner.rows import pack, step_rows

    trainer = Trainer(
        Model(str(setting.policy)), loss=partial(aipo, rho=RHO), lr=LR, max_grad_norm=CLIP
    )
    learner = make_learner(trainer, trainer.model, node="trainer", device="cpu")
    groups = as_groups(setting.rollouts)
    packing = partial(pack, share=share)

    def step() -> None:
        with mock.patch.object(learning, "pack", packing):
            rows = step_rows(groups, learner.loss.columns)
            for part in learner.begin(rows, 0):
                learner.micro(part)
            outcome = learner.end(LR)
        if outcome.culprit is not None:
            raise RuntimeError(f"the step is not finite: {outcome.culprit}")

    rows = step_rows(groups, learner.loss.columns)
    return System(
        step, learner.forward.module, packing(rows.tokens.ids, rows.tokens.mask, rows.offsets).nodes
    )


def padded(setting: Setting) -> System:
    """A loop over tensors as one would write it first: one row per rollout, padded at the right."""
    model = _load(setting.policy).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    tokens_B_L, old_B_L, mask_B_L = _right_padded(setting.rollouts)
    advantage_B = torch.from_numpy(setting.rollouts.advantage).float()
    total = mask_B_L.sum()
    width = tokens_B_L.shape[1]
    completion_width = width - min(map(len, setting.rollouts.prompts))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for first in range(0, len(tokens_B_L), setting.rows):
            part = slice(first, first + setting.rows)
            logits = model(
                input_ids=tokens_B_L[part, :-1], use_cache=False, logits_to_keep=completion_width
            ).logits
            new = (
                logits.log_softmax(-1)
                .gather(-1, tokens_B_L[part, -completion_width:, None])
                .squeeze(-1)
            )
            losses = aipo(new, old_B_L[part, -completion_width:], advantage_B[part, None], rho=RHO)
            ((losses * mask_B_L[part, -completion_width:]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return System(step, model, len(tokens_B_L) * (width - 1))


def trl(setting: Setting) -> System:
    """TRL's GRPOTrainer, given its inputs."""
    from datasets import Dataset

    theirs: Any = importlib.import_module("trl")
    batch = as_padded(setting.rollouts)
    count = len(batch.advantage)
    batches = [
        _trl_inputs(batch, slice(first, first + setting.rows))
        for first in range(0, count, setting.rows)
    ]

    class Given(theirs.GRPOTrainer):  # type: ignore[misc]
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return generation_batch

    with tempfile.TemporaryDirectory() as folder:
        config = theirs.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=setting.rows,
            gradient_accumulation_steps=len(batches),
            num_generations=2,
            num_iterations=1,
            beta=0.0,
            loss_type="cispo",
            epsilon_high=RHO,
            learning_rate=LR,
            weight_decay=0.0,
            optim="adamw_torch_fused",
            max_grad_norm=CLIP,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            max_completion_length=batch.completion_ids.shape[1],
            temperature=1.0,
        )
        trainer = Given(
            model=_load(setting.policy),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            processing_class=AutoTokenizer.from_pretrained(setting.policy, padding_side="left"),
            train_dataset=Dataset.from_list([{"prompt": "w1"}] * count),
        )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = len(batches)

    def step() -> None:
        trainer.optimizer.zero_grad()
        for inputs in batches:
            trainer.training_step(trainer.model, inputs, None)
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), CLIP)
        trainer.optimizer.step()

    return System(
        step, trainer.model, count * (batch.prompt_ids.shape[1] + batch.completion_ids.shape[1])
    )


OPEN: dict[str, Callable[[Setting], System]] = {
    "packed": packed,
    "unshared": partial(packed, share=False),
    "padded": padded,
    "trl": trl,
}


def _trl_inputs(batch: Padded, part: slice) -> dict[str, Tensor]:
    """As GRPOTrainer's own generation leaves them for one forward and backward."""
    return {
        "prompt_ids": batch.prompt_ids[part],
        "prompt_mask": batch.prompt_mask[part],
        "completion_ids": batch.completion_ids[part],
        "completion_mask": batch.completion_mask[part],
        "advantages": batch.advantage[part],
        "old_per_token_logps": batch.logprobs[part],
        "num_items_in_batch": batch.completion_mask.sum(),
    }


def _right_padded(rollouts: Rollouts) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the generator's log-probabilities and the mask of what is trained, each [B, L]."""
    rows = [
        (torch.from_numpy(prompt), torch.from_numpy(completion), torch.from_numpy(logprobs).float())
        for prompt, completion, logprobs in zip(
            rollouts.prompts, rollouts.completions, rollouts.logprobs, strict=True
        )
    ]
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return (
        pad([torch.cat([prompt, completion]) for prompt, completion, _ in rows]),
        pad([torch.cat([torch.zeros(len(prompt)), logprobs]) for prompt, _, logprobs in rows]),
        pad(
            [
                torch.cat([torch.zeros(len(prompt)), torch.ones(len(logprobs))])
                for prompt, _, logprobs in rows
            ]
        ),
    )


def _load(policy: Path) -> Any:
    from operators.models.loading import no_progress_bar

    with no_progress_bar():
        return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
