"""What drawn graphs are run with: a policy with heads enough for tensor parallelism."""

from pathlib import Path

import pytest

from .outcome import DrawnRuns


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a policy of two layers with 4 heads, 2 of them for keys and values, and an
    output layer.
    """
    import torch
    from rigs.policy import ALPHABET, CONTEXT_TOKENS
    from transformers import LlamaConfig, LlamaForCausalLM

    from operators.warm_start.train import character_tokenizer

    folder, tokenizer = (
        tmp_path_factory.mktemp("heads"),
        character_tokenizer(ALPHABET, CONTEXT_TOKENS),
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        initializer_range=32**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def outcomes(heads: Path, tmp_path_factory: pytest.TempPathFactory) -> DrawnRuns:
    """Runs graphs around that policy."""
    return DrawnRuns(heads, tmp_path_factory.mktemp("runs"))
