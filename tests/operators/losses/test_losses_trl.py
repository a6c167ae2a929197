"""Losses that TRL has too equal TRL's, value and gradient, on the same tensors; runs where trl is
installed.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loss_oracles as oracle
import pytest
import torch
from torch import Tensor

from operators import losses
from operators.losses.per_rollout import sum_per_rollout
from operators.training.learner.loss_function import read_loss

trl = pytest.importorskip("trl", minversion="1.0")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

MAX_TOKENS = 16


def _trainer(kind: Any, config: Any, policy: Path, rows: list[dict[str, str]], **knobs: Any) -> Any:
    """A trainer of theirs around a small policy; nothing of it is used but its loss."""
    datasets = pytest.importorskip("datasets")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return kind(
        model=AutoModelForCausalLM.from_pretrained(policy),
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(
            policy, padding_side="left", pad_token=" ", eos_token="."
        ),
        **knobs,
    )


def _online(kind: Any, config: Any, policy: Path, folder: Path, **knobs: Any) -> Any:
    arguments = config(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=MAX_TOKENS,
        **knobs,
    )
    trainer = _trainer(
        kind, arguments, policy, [{"prompt": "a"}] * 4, reward_funcs=lambda completions, **_: [0.0]
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def _padded(values_T: Tensor, rollouts: list[oracle.Rollout]) -> Tensor:
    """Marked tokens at their places in [rollouts, tokens], something else at all others."""
    width = max(len(r.mask) for r in rollouts)
    mask = torch.tensor([r.mask + [False] * (width - len(r.mask)) for r in rollouts])
    return torch.full(mask.shape, -7.0, dtype=values_T.dtype).masked_scatter(mask, values_T)


def _inputs(known: dict[str, Tensor], rollouts: list[oracle.Rollout]) -> dict[str, Tensor]:
    mask = _padded(known["new_logprobs"].detach(), rollouts) != -7.0
    prompts = torch.ones(len(rollouts), 1, dtype=torch.long)
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": mask.long(),
        "completion_mask": mask.long(),
        "advantages": torch.stack(
            [_padded(known["advantage"], rollouts)[at, m][0] for at, m in enumerate(mask)]
        ),
        "old_per_token_logps": _padded(known["logprobs"], rollouts),
        "ref_per_token_logps": _padded(known["ref_logprobs"], rollouts),
        "num_items_in_batch": mask.sum(),
    }


def _give(trainer: Any, known: dict[str, Tensor], rollouts: list[oracle.Rollout]) -> None:
    """Let these be the log-probabilities and entropies that the trainer's model computes."""
    computed = [_padded(known[name], rollouts) for name in ("new_logprobs", "entropy")]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (*computed, None)


def _ours(
    loss: Any, normalize: str, known: dict[str, Tensor], rollouts: list[oracle.Rollout]
) -> Tensor:
    read = read_loss(loss, "trainer")
    found = read.call(**{name: known[name] for name in read.columns + read.computed})
    return oracle.reduced(found, rollouts, normalize)


def _assert_equal(ours: Tensor, theirs: Tensor, leaf: Tensor, *, value: bool = True) -> None:
    ours_grad, theirs_grad = (
        torch.autograd.grad(total, leaf, retain_graph=True)[0] for total in (ours, theirs)
    )
    assert theirs_grad.abs().max() > 1e-6
    assert torch.allclose(ours_grad, theirs_grad.double(), rtol=1e-6, atol=1e-9)
    if value:
        assert abs(ours.item() - theirs.item()) < 1e-6 * max(1.0, abs(ours.item()))


GROUP_LOSSES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "grpo": (losses.grpo, "rollout_means", {"loss_type": "grpo"}),
    "grpo with kl": (
        losses.with_kl(losses.grpo, beta=0.04),
        "rollout_means",
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    ),
    "grpo with corrected kl": (
        losses.with_kl(losses.grpo, beta=0.04, corrected=True),
        "rollout_means",
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True},
    ),
    "ppo's policy loss": (losses.ppo, "tokens", {"loss_type": "bnpo"}),
    "dr_grpo": (
        partial(losses.dr_grpo, max_tokens=MAX_TOKENS),
        "rollouts",
        {"loss_type": "dr_grpo"},
    ),
    "dapo": (losses.dapo, "tokens", {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dapo with entropy": (
        losses.with_entropy(losses.dapo, weight=0.01),
        "tokens",
        {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.01},
    ),
    "cispo": (
        partial(losses.cispo, clip_high=0.5),
        "tokens",
        {"loss_type": "cispo", "epsilon_high": 1.5},
    ),
    "aipo": (partial(losses.aipo, rho=1.5), "tokens", {"loss_type": "cispo", "epsilon_high": 1.5}),
    "gspo": (
        losses.gspo,
        "rollout_means",
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
    "gspo, wide": (
        partial(losses.gspo, clip_low=0.2, clip_high=0.3),
        "rollout_means",
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.2,
            "epsilon_high": 0.3,
        },
    ),
}


@pytest.mark.parametrize("name", GROUP_LOSSES)
def test_group_losses_equal_trls(name, policy, tmp_path):
    loss, normalize, knobs = GROUP_LOSSES[name]
    trainer = _online(trl.GRPOTrainer, trl.GRPOConfig, policy, tmp_path, **{"beta": 0.0, **knobs})
    for seed in range(5):
        rollouts = oracle.draw(seed)
        known = oracle.flat(rollouts)
        _give(trainer, known, rollouts)
        theirs = trainer._compute_loss(trainer.model, _inputs(known, rollouts))
        _assert_equal(_ours(loss, normalize, known, rollouts), theirs, known["new_logprobs"])


WEIGHTED: dict[str, tuple[Any, str, tuple[float | None, float]]] = {
    "truncated_is": (partial(losses.truncated_is, cap=1.5), "token_truncate", (None, 1.5)),
    "icepop": (partial(losses.icepop, least=0.5, most=1.5), "token_mask", (0.5, 1.5)),
    "sequence_truncated_is": (
        partial(losses.sequence_truncated_is, cap=1.5),
        "sequence_truncate",
        (None, 1.5),
    ),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_engine_corrections_equal_trls_under_the_weights_that_its_documentation_gives(
    name, policy, tmp_path
):
    loss, mode, (least, most) = WEIGHTED[name]
    trainer = _online(trl.GRPOTrainer, trl.GRPOConfig, policy, tmp_path, beta=0.0, loss_type="dapo")
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    rollouts = oracle.draw(2)
    known = oracle.flat(rollouts)
    gap_T = known["proximal_logprobs"] - known["logprobs"]
    ratio_T = (
        sum_per_rollout(gap_T, known["rollout_index"]) if mode.startswith("sequence") else gap_T
    ).exp()
    cut_T = (
        ratio_T.clamp(max=most)
        if mode.endswith("truncate")
        else ratio_T * ((ratio_T >= least) & (ratio_T <= most))
    )
    _give(trainer, known, rollouts)
    inputs = _inputs(known, rollouts) | {
        "old_per_token_logps": _padded(known["proximal_logprobs"], rollouts),
        "importance_sampling_ratio": _padded(cut_T, rollouts),
    }
    theirs = trainer._compute_loss(trainer.model, inputs)
    _assert_equal(_ours(loss, "tokens", known, rollouts), theirs, known["new_logprobs"])


def test_rloo_has_trls_gradient_on_its_own_rollouts(policy, tmp_path):
    trainer = _online(trl.RLOOTrainer, trl.RLOOConfig, policy, tmp_path, beta=0.0)
    rollouts = oracle.draw(0)
    known = oracle.flat(rollouts)
    _give(trainer, known, rollouts)
    inputs = _inputs(known, rollouts)
    new = _padded(known["new_logprobs"].detach(), rollouts)
    inputs["old_logps"] = (new * inputs["completion_mask"]).sum(1)
    theirs = trainer._compute_loss(trainer.model, inputs)
    _assert_equal(
        _ours(losses.rloo, "rollouts", known, rollouts), theirs, known["new_logprobs"], value=False
    )


def test_dpo_equals_trls_on_pairs(policy, tmp_path):
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        beta=0.1,
        precompute_ref_log_probs=True,
        per_device_train_batch_size=1,
        dataset_num_proc=None,
    )
    trainer = _trainer(
        trl.DPOTrainer, arguments, policy, [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2
    )
    trainer.precompute_ref_logps = True
    trainer.model.train()
    drawn = [r for seed in range(9) for r in oracle.draw(seed)]
    pairs = []
    for group, (first, second) in enumerate(zip(drawn[::2], drawn[1::2], strict=False)):
        first.group, second.group, first.reward, second.reward = group, group, float(group % 2), 0.5
        pairs.append((first, second) if first.reward > second.reward else (second, first))
    rollouts = [r for number in range(len(pairs)) for r in drawn[2 * number : 2 * number + 2]]
    known = oracle.flat(rollouts)
    ordered = [rollouts.index(pair[side]) for side in (0, 1) for pair in pairs]
    new, ref = (
        _padded(known[name], rollouts)[ordered] for name in ("new_logprobs", "ref_logprobs")
    )
    mask = new.detach() != -7.0
    ref_logps = (ref * mask).sum(1).chunk(2)
    none = torch.zeros_like(new.detach())
    outputs = SimpleNamespace(
        log_probs=new * mask,
        entropy=none,
        mean_logits=none,
        is_top1=torch.zeros_like(mask),
        log_sum_sq_probs=none,
    )
    marked = torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask.long()], dim=1)
    inputs = {
        "input_ids": marked,
        "attention_mask": torch.ones_like(marked),
        "completion_mask": marked,
        "ref_chosen_logps": ref_logps[0],
        "ref_rejected_logps": ref_logps[1],
    }
    theirs = trainer._compute_loss(lambda **_: outputs, inputs, False)
    _assert_equal(
        _ours(losses.dpo, "rollout_means", known, rollouts), theirs, known["new_logprobs"]
    )
