"""Laws of gradients that are written in place: those of autograd, whatever the step before has left
there.
"""

from typing import Any

import pytest
import torch
from trainer_rig import VOCABULARY, gradient, group, rows_of, tiny_llama, tiny_trainer
from transformers import Qwen2Config, Qwen2ForCausalLM

from operators.training.learner.build import learner_of
from operators.training.learner.cpu import DirectGradients, multiplies_bfloat16
from operators.training.learner.learner import Learner
from operators.training.learner.policy import Policy

GROUPS = [group(number, size=4) for number in range(5)]
OTHERS = [group(number, size=4) for number in range(5, 9)]


def _qwen(*, tied: bool) -> Any:
    """With biases, and an id for padding that is among the tokens."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=5,
    )
    return Qwen2ForCausalLM(config).eval()


MODELS = {
    "llama": tiny_llama,
    "qwen": lambda: _qwen(tied=False),
    "tied qwen": lambda: _qwen(tied=True),
}


def _learner(
    module: Any, *, is_direct: bool, is_rounded: bool = False, sliced: bool = False, **knobs: Any
) -> Learner:
    trainer = tiny_trainer(**knobs)
    forward = Policy(module, compute=torch.bfloat16 if is_rounded else None)
    if sliced:
        forward._vocabulary = 1 << 24
    learner = learner_of(trainer, forward, node="trainer")
    if is_direct:
        learner.direct = forward.direct = DirectGradients(module, is_rounded=is_rounded)
        assert all(
            weight in learner.direct
            for name, weight in learner.parameters.items()
            if "proj.weight" in name
        )
    return learner


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("micro_batch_tokens", [30, 10_000])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_in_place_are_those_of_autograd(model, sliced, micro_batch_tokens, checkpointing):
    make = MODELS[model]
    knobs: dict[str, Any] = {
        "micro_batch_tokens": micro_batch_tokens,
        "gradient_checkpointing": checkpointing,
    }
    wanted_loss, wanted, _ = gradient(
        _learner(make(), is_direct=False, sliced=sliced, **knobs), rows_of(*GROUPS)
    )
    learner = _learner(make(), is_direct=True, sliced=sliced, **knobs)
    gradient(learner, rows_of(*OTHERS))
    loss, found, _ = gradient(learner, rows_of(*GROUPS))
    assert abs(loss - wanted_loss) < 1e-6 * max(1, abs(wanted_loss))
    assert torch.allclose(found, wanted, rtol=0, atol=1e-6 * wanted.abs().max().item())


def test_a_step_in_which_nothing_is_computed_leaves_zeros():
    learner = _learner(tiny_llama(), is_direct=True)
    gradient(learner, rows_of(*GROUPS))
    loss, found, norm = gradient(learner, rows_of(group(1, advantages=[0.0] * 3)))
    assert (loss, norm) == (0.0, 0.0)
    assert not found.any()


@pytest.mark.skipif(not multiplies_bfloat16(), reason="this processor multiplies no bfloat16")
@pytest.mark.parametrize("model", list(MODELS))
def test_products_of_bfloat16_give_nearly_the_gradient_of_float32(model):
    make = MODELS[model]
    wanted_loss, wanted, _ = gradient(_learner(make(), is_direct=False), rows_of(*GROUPS))
    found_loss, found, _ = gradient(
        _learner(make(), is_direct=True, is_rounded=True), rows_of(*GROUPS)
    )
    assert abs(found_loss - wanted_loss) < 0.02 * max(1, abs(wanted_loss))
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.999
