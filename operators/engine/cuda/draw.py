"""Triton kernels that draw the next token where nothing is truncated: two readings of the logits,
nothing of that size written.

The first kernel measures each stretch of a row's vocabulary (its largest logit, its sum of
exponentials); the second finds the stretch that a row's random number falls into, and the token in
it. A row's result depends on nothing but the row. Axes: n rows, V vocabulary, S stretches.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# mypy: disable-error-code="import-not-found, unused-ignore"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from operators.engine import sampler
from operators.engine.sampler import Draw, RowSampling, Sampling, uniform

MOST_STRETCHES = 64
"""What the second kernel looks through at once."""

LEAST_STRETCH = 1024
"""Tokens, so that a program has enough to do."""


def draw(
    logits: torch.Tensor,
    sampling: Sampling | RowSampling,
    seeds: torch.Tensor,
    counts: torch.Tensor,
    *,
    seen: torch.Tensor | None = None,
    keep: bool = False,
) -> Draw:
    """`sampler.draw`, by the kernels below where temperatures are all that the rows ask for."""
    knobs = sampler.columns_of(sampling, logits)
    kind = knobs.kind
    if kind.leaves_out or kind.repetition_penalty or (keep and kind.greedy):
        return sampler.draw(logits, knobs, seeds, counts, seen=seen, keep=keep)
    sharpness = torch.ones(len(logits), 1, device=logits.device)
    if knobs.temperature is not None:
        sharpness = sharpness / knobs.temperature
    if knobs.greedy is not None:
        sharpness = sharpness.masked_fill(knobs.greedy, 0.0)
    return Draw(*draw_plain(logits, sharpness[:, 0], seeds, counts), None)


def draw_plain(
    logits: torch.Tensor, sharpness: torch.Tensor, seeds: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each row, int64 [n], and its log-probability, float32 [n]; not finite for
    broken logits.

    The draw of `operators.engine.sampler` for temperatures and nothing else: the same noise, the
    same tokens up to rounding. logits [n, V]; seeds and counts int64 [n]; sharpness: one over the
    temperature, float32 [n], dense, and 0 where the likeliest token is taken.
    """
    rows, vocabulary = logits.shape
    stretch = max(LEAST_STRETCH, triton.next_power_of_2(-(-vocabulary // MOST_STRETCHES)))
    stretches = -(-vocabulary // stretch)
    most = torch.empty(rows, stretches, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(most)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    marks = uniform(seeds, counts)
    logit_arguments = (logits, *logits.stride(), vocabulary, sharpness)
    with torch.cuda.device_of(logits):
        _measure[(rows, stretches)](*logit_arguments, most, sums, stretch=stretch, num_warps=4)
        _pick[(rows,)](
            *logit_arguments,
            most,
            sums,
            marks,
            tokens,
            logprobs,
            stretches,
            stretch=stretch,
            padded=triton.next_power_of_2(stretches),
            num_warps=8,
        )
    return tokens, logprobs


@triton.jit
def _factor(sharpness):
    return tl.where(sharpness == 0.0, 1.0, sharpness)


@triton.jit
def _measure(
    logits, row_stride, at_stride, vocabulary, sharpness, most, sums, stretch: tl.constexpr
):
    """The largest logit of one stretch, and its sum of exponentials relative to that."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * stretch + tl.arange(0, stretch)
    block = tl.load(
        logits + row * row_stride + at * at_stride, mask=at < vocabulary, other=-float("inf")
    )
    block = block.to(tl.float32) * _factor(tl.load(sharpness + row))
    top = tl.max(block, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    to = row * tl.num_programs(1) + part
    tl.store(most + to, top)
    tl.store(sums + to, tl.sum(tl.exp(block - base), 0))


@triton.jit(do_not_specialize=["stretches"])
def _pick(
    logits,
    row_stride,
    at_stride,
    vocabulary,
    sharpness,
    most,
    sums,
    marks,
    tokens,
    logprobs,
    stretches,
    stretch: tl.constexpr,
    padded: tl.constexpr,
):
    """The first token at which the summed probability exceeds the row's mark, or the likeliest."""
    row = tl.program_id(0).to(tl.int64)
    sharp = tl.load(sharpness + row)
    part = tl.arange(0, padded)
    in_range = part < stretches
    tops = tl.load(most + row * stretches + part, mask=in_range, other=-float("inf"))
    top = tl.max(tops, 0)
    part_sums = tl.load(sums + row * stretches + part, mask=in_range, other=0.0)
    weights = (part_sums * tl.exp(tops - top)).to(tl.float64)
    reached = tl.cumsum(weights, 0)
    total = tl.sum(weights, 0)
    mark = tl.load(marks + row) * total
    last = tl.max(tl.where(weights > 0.0, part, 0), 0)
    chosen = tl.minimum(tl.sum((reached <= mark).to(tl.int32), 0), last)
    likeliest = tl.minimum(tl.min(tl.where(tops == top, part, padded), 0), stretches - 1)
    chosen = tl.where(sharp == 0.0, likeliest, chosen)
    mark -= tl.sum(tl.where(part < chosen, weights, 0.0), 0)

    inside = tl.arange(0, stretch)
    at = chosen * stretch + inside
    block = tl.load(
        logits + row * row_stride + at * at_stride, mask=at < vocabulary, other=-float("inf")
    )
    block = block.to(tl.float32) * _factor(sharp)
    exps = tl.exp(block - top).to(tl.float64)
    last = tl.max(tl.where(exps > 0.0, inside, 0), 0)
    token = tl.minimum(tl.sum((tl.cumsum(exps, 0) <= mark).to(tl.int32), 0), last)
    best = tl.min(tl.where(block == top, inside, stretch), 0)
    token = tl.where(sharp == 0.0, tl.where(best < stretch, best, 0), token)
    logit = tl.sum(tl.where(inside == token, block, 0.0), 0)
    drawn = logit - top - tl.log(total.to(tl.float32))
    certain = (top - top) + 0.0 * total.to(tl.float32)  # not finite where the logits are not
    tl.store(tokens + row, (chosen * stretch + token).to(tl.int64))
    tl.store(logprobs + row, tl.where(sharp == 0.0, certain, drawn))
