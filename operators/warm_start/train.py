"""A small Llama with a character tokenizer, and its supervised training on answers; imports
torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dataflow.errors import GraphError
from operators.warm_start.launch import EOS, PAD, UNKNOWN, WarmStartSpec


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


IGNORED = -100
WARMUP_STEPS = 20


def encode(
    tokenizer: PreTrainedTokenizerFast, examples: list[tuple[str, str]], max_positions: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Examples as right-padded token ids [N, T], labels [N, T] (prompt and padding ignored) and
    lengths [N].

    Raises:
        GraphError: an example holds a character outside of the alphabet, or is longer than
            `max_positions`.
    """
    eos, pad, unknown = tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id
    assert isinstance(eos, int) and isinstance(pad, int)
    prompts = tokenizer([prompt for prompt, _ in examples])["input_ids"]
    answers = tokenizer([answer for _, answer in examples])["input_ids"]
    lengths = [len(p) + len(a) + 1 for p, a in zip(prompts, answers, strict=True)]
    for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if unknown in prompt or unknown in answer:
            raise GraphError(
                f"example {n} of a warm start has a character outside of the alphabet; "
                f"found {examples[n]!r}; add the character to alphabet="
            )
        if lengths[n] > max_positions:
            raise GraphError(
                f"example {n} of a warm start is too long; found {lengths[n]} tokens with the end"
                f" token, allowed are {max_positions}; raise max_positions"
            )
    tokens_N_T = torch.full((len(examples), max(lengths)), pad)
    labels_N_T = torch.full_like(tokens_N_T, IGNORED)
    for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens_N_T[n, : lengths[n]] = torch.tensor([*prompt, *answer, eos])
        labels_N_T[n, len(prompt) : lengths[n]] = tokens_N_T[n, len(prompt) : lengths[n]]
    return tokens_N_T, labels_N_T, torch.tensor(lengths)


def batches(count: int, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches of example numbers [B], each example once per epoch, in an order of the
    seed's.
    """
    order = torch.Generator().manual_seed(seed)
    while True:
        numbers_N = torch.randperm(count, generator=order)
        yield from (numbers_N[first : first + batch_size] for first in range(0, count, batch_size))


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[tuple[str, str]],
    spec: WarmStartSpec,
    report: Callable[[int, float], None],
) -> float:
    """Train the model in place; return the mean loss (nats per answer token) of the last tenth of
    the steps.

    `report` is called after every step with the step's number, from 1, and its loss.
    """
    tokens_N_T, labels_N_T, lengths_N = encode(tokenizer, examples, spec.max_positions)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / WARMUP_STEPS) * (1 - 0.9 * step / spec.steps)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    picks = batches(len(examples), spec.batch_size, spec.seed)
    losses: list[float] = []
    model.train()
    for step in range(1, spec.steps + 1):
        pick_B = next(picks)
        longest = int(lengths_N[pick_B].max())
        tokens_B_T, labels_B_T = tokens_N_T[pick_B, :longest], labels_N_T[pick_B, :longest]
        logits_B_T_V = model(input_ids=tokens_B_T, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits_B_T_V[:, :-1].flatten(0, 1), labels_B_T[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        report(step, losses[-1])
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)
