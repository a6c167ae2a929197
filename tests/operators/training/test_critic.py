"""A critic's values: those of transformers' own forward, packed or padded, at the token before each
chosen one.
"""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rigs.heads import SIZES, classifier
from trainer_rig import group, rows_of

from operators.models.folders import ModelError
from operators.training.learner.policy import Critic
from operators.training.learner.rows import pack


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def packed_rows() -> tuple[Any, Any]:
    rows = rows_of(group(0), group(1, completion=9), group(2))
    return rows, pack(rows.tokens.ids, rows.tokens.mask, rows.offsets)


def plain_values(module: Any, rows: Any) -> torch.Tensor:
    """Every rollout by itself: the number at the token before each chosen one."""
    found = []
    for start, end in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        logits = module(
            input_ids=torch.from_numpy(rows.tokens.ids[None, start:end].astype(np.int64))
        ).logits[0, :, 0]
        chosen = np.flatnonzero(rows.chosen_S[start:end])
        found.append(logits[torch.from_numpy(chosen - 1)])
    return torch.cat(found)


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_values_are_those_of_the_plain_forward(family: str, is_packed: bool) -> None:
    module = classifier(family, "TokenClassification")
    rows, packed = packed_rows()
    wanted = plain_values(module, rows)
    critic = Critic(module, packed=is_packed)
    assert critic.packs == is_packed
    found = critic.computed(packed, None, ())["new_values"]
    assert found.dtype == torch.float32 and wanted.abs().max() > 0.1
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_a_model_that_can_be_packed_is() -> None:
    assert Critic(classifier("Qwen2", "TokenClassification")).packs


def test_gradients_are_those_of_the_plain_forward() -> None:
    module, other = (
        classifier("Llama", "TokenClassification"),
        classifier("Llama", "TokenClassification"),
    )
    rows, packed = packed_rows()
    Critic(module).values(packed).square().sum().backward()
    plain_values(other, rows).square().sum().backward()
    for (name, ours), theirs in zip(module.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-3, msg=name)


def test_under_autocast_the_head_is_computed_in_float32() -> None:
    module = classifier("Llama", "TokenClassification")
    _, packed = packed_rows()
    found = Critic(module, compute=torch.bfloat16).values(packed)
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())
    torch.testing.assert_close(found, Critic(module).values(packed), atol=0.1, rtol=0.1)


def test_a_model_without_a_head_of_one_number_is_refused() -> None:
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with pytest.raises(ModelError, match="one linear layer called score or classifier"):
        Critic(module)


def test_a_model_that_reads_in_both_directions_is_refused() -> None:
    module = classifier("Bert", "TokenClassification")
    with pytest.raises(ModelError, match="both directions"):
        Critic(module)
