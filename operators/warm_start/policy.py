"""A small Llama with a character tokenizer, freshly initialised; imports torch."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from operators.warm_start.spec import EOS, PAD, UNKNOWN, WarmStartSpec


def character_tokenizer(alphabet: str, max_positions: int) -> PreTrainedTokenizerFast:
    """A fast tokenizer with one token per character of `alphabet`; it adds no token of its own to a
    text.
    """
    tokens = [PAD, EOS, UNKNOWN, *alphabet]
    core = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges=[], unk_token=UNKNOWN)
    )
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def small_llama(spec: WarmStartSpec, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of the spec's size in float32 with tied embeddings, its weights drawn from the spec's
    seed.
    """
    torch.manual_seed(spec.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=spec.width,
        intermediate_size=spec.mlp_width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=True,
        initializer_range=spec.width**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)
