"""The knobs by which next tokens are drawn from logits, of one row or as columns of many, and
the draw.

Noise is a function of (seed of the rollout, how many tokens it has drawn), and no row's arithmetic
depends on the others: on a CPU, equal logits, sampling, seed and count give the same token and the
same log-probability to the last bit, whatever else is in the batch. On a GPU prefix sums may be
added up in another order for other batch sizes; they are float64, so a token changes only where
noise hits a boundary to 1e-15.

The order of the knobs is that of `generate` in transformers: repetition penalty, temperature,
top-k, top-p, min-p; each truncation sees what the one before left. Axes: n rows, V vocabulary, B
blocks of it, W tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dataflow.records import AnyArray


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits. Raises ValueError for knobs out of range."""

    temperature: float = 1.0
    """Divides the logits; 0: always the likeliest token, with log-probability 0."""
    top_k: int = 0
    """Only the k likeliest tokens (and those tied with the last of them); 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability (and those tied with the last
    of them), at least one; 1: all."""
    min_p: float = 0.0
    """Only tokens at least this many times as likely as the likeliest; 0: all."""
    repetition_penalty: float = 1.0
    """Logits of tokens that stand in prompt or completion are divided by it if positive, else
    multiplied; 1: off."""

    def __post_init__(self) -> None:
        for name, fits, range_ in (
            ("temperature", 0 <= self.temperature < math.inf, "0 or a positive number"),
            ("top_k", self.top_k >= 0, "0 or a positive number of tokens"),
            ("top_p", 0 <= self.top_p <= 1, "a probability from 0 to 1"),
            ("min_p", 0 <= self.min_p <= 1, "a share from 0 to 1"),
            (
                "repetition_penalty",
                0 < self.repetition_penalty < math.inf,
                "a positive number, 1 for none",
            ),
        ):
            if not fits:
                raise ValueError(f"{name} does not fit; found {getattr(self, name)}; give {range_}")


class DrawKind(NamedTuple):
    """Which knobs any of some rows uses: known without asking the device, so that a captured draw
    may depend on it.
    """

    temperature: bool
    greedy: bool
    """Whether any temperature is 0."""
    all_greedy: bool
    widest: int
    """The largest top_k; 0: none."""
    top_p: bool
    min_p: bool
    repetition_penalty: bool

    @property
    def leaves_out(self) -> bool:
        """Whether top-k, top-p or min-p may leave tokens out."""
        return self.widest > 0 or self.top_p or self.min_p

    @property
    def common(self) -> DrawKind:
        """One of few kinds that draw what this one draws, of rows that come and go; without
        penalty.
        """
        wide = max(LEAST_WIDE, 1 << (self.widest - 1).bit_length()) if self.widest else 0
        return self._replace(
            temperature=True, greedy=True, all_greedy=False, widest=wide, repetition_penalty=False
        )


LEAST_WIDE = 64
"""Tokens among which common kinds of draws look for the k likeliest, at least."""

KNOBS = tuple(knob.name for knob in fields(Sampling))


def knob_columns(samplings: Sequence[Sampling]) -> AnyArray:
    """The knobs of each row in the order of KNOBS, float64 [5, n]."""
    rows = [[getattr(sampling, name) for name in KNOBS] for sampling in samplings]
    return np.array(rows, np.float64).reshape(-1, len(KNOBS)).T


def kind_of(columns: AnyArray) -> DrawKind:
    """What rows with these knobs, float64 [5, n], need of a draw."""
    temperature, top_k, top_p, min_p, penalty = columns
    greedy = temperature == 0
    return DrawKind(
        temperature=bool(((temperature != 1) & ~greedy).any()),
        greedy=bool(greedy.any()),
        all_greedy=bool(greedy.all()),
        widest=int(top_k.max(initial=0)),
        top_p=bool((top_p < 1).any()),
        min_p=bool((min_p > 0).any()),
        repetition_penalty=bool((penalty != 1).any()),
    )


@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """One Sampling per row, as columns [n, 1]; None where no row uses the knob.

    Columns may be of one row, which then holds for all.
    """

    temperature: Tensor | None
    greedy: Tensor | None
    """True where the temperature is 0 (and `temperature` 1)."""
    top_k: Tensor | None
    top_p: Tensor | None
    """float64; infinite where off."""
    min_p: Tensor | None
    repetition_penalty: Tensor | None
    kind: DrawKind

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device | str) -> RowSampling:
        """Bring these onto the device, one per row."""
        columns = knob_columns(samplings)
        return cls.by(torch.from_numpy(columns).to(device), kind_of(columns))

    @classmethod
    def by(cls, columns: Tensor, kind: DrawKind) -> RowSampling:
        """From the knobs on the device, float64 [5, n], of which `kind` says what is used."""
        temperature, top_k, top_p, min_p, penalty = columns[:, :, None]
        greedy = temperature == 0 if kind.greedy else None
        warm = temperature if greedy is None else temperature.masked_fill(greedy, 1.0)
        return cls(
            temperature=warm.float() if kind.temperature else None,
            greedy=greedy,
            top_k=top_k.long() if kind.widest else None,
            top_p=top_p.masked_fill(top_p >= 1, math.inf) if kind.top_p else None,
            min_p=min_p.float() if kind.min_p else None,
            repetition_penalty=penalty.float() if kind.repetition_penalty else None,
            kind=kind,
        )


# Which tokens top-k, top-p and min-p leave out of a draw, each seeing what the one before left.

NUCLEI = (64, 1024)
"""Numbers of likeliest tokens among which a CPU looks for the nucleus of top-p before it sorts the
vocabulary."""
SORTED_WHOLE = 1024
"""A CPU sorts rows up to this size rather than search them for their largest: numpy's sort is
vectorised."""
SORTED_SHARE = 16
"""And larger ones where more than one number in this many is wanted."""


def left_out(scores: Tensor, shares: Tensor, knobs: RowSampling) -> Tensor | None:
    """Which tokens truncation leaves out, bool [n, V]; None where no row truncates. shares: softmax
    of the scores.
    """
    gone = None
    if knobs.top_k is not None:
        widest = min(knobs.kind.widest, scores.shape[-1])
        likeliest = _largest(scores, widest)
        last = (knobs.top_k.clamp(1, widest) - 1).expand(len(scores), 1)
        gone = (scores < likeliest.gather(-1, last)) & (knobs.top_k > 0)
    if knobs.top_p is not None:
        remaining = shares if gone is None else shares.masked_fill(gone, 0)
        outside = remaining < _least_of_nucleus(remaining, knobs.top_p)
        gone = outside if gone is None else gone | outside
    if knobs.min_p is not None:
        unlikely = shares < shares.amax(dim=-1, keepdim=True) * knobs.min_p
        gone = unlikely if gone is None else gone | unlikely
    return gone


def _least_of_nucleus(shares: Tensor, top_p: Tensor) -> Tensor:
    """The smallest share that top-p keeps, float32 [n, 1]; 0 where it is off. shares need not add
    up to 1.
    """
    width = shares.shape[-1]
    target = top_p * block_sums(shares).sum(dim=-1, keepdim=True, dtype=torch.float64)
    few = [count for count in NUCLEI if shares.is_cpu and not _sorts(count, width)]
    for count in (*few, width):
        ordered = _largest(shares, count)
        reached = ordered.cumsum(-1, dtype=torch.float64)
        if count == width or bool(((reached[:, -1:] >= target) | top_p.isinf()).all()):
            break
    last = torch.searchsorted(reached, target).clamp_(max=ordered.shape[-1] - 1)
    return ordered.gather(-1, last).masked_fill(top_p.isinf(), 0)


def _largest(values: Tensor, count: int) -> Tensor:
    """The largest of each row of [n, V], the first first, [n, count]; not a number counts as the
    largest.
    """
    width = values.shape[-1]
    if values.is_cpu and _sorts(count, width):
        return torch.from_numpy(np.sort(values.detach().numpy(), axis=-1)[:, width - count :]).flip(
            -1
        )
    if count == width:
        return torch.sort(values, dim=-1, descending=True).values
    return torch.topk(values, count, dim=-1).values


def _sorts(count: int, width: int) -> bool:
    """Whether a CPU is quicker when it sorts the whole row."""
    return width <= SORTED_WHOLE or SORTED_SHARE * count > width


def block_width(vocabulary: int) -> int:
    """Tokens that are first looked at as one: about the root of their number."""
    return 1 << (vocabulary.bit_length() // 2)


def block_sums(shares: Tensor) -> Tensor:
    """Sums over blocks of neighbouring tokens, the last one maybe shorter, float32 [n, B]."""
    width = block_width(shares.shape[-1])
    whole = shares.shape[-1] // width
    sums = torch.unflatten(shares[:, : whole * width], -1, (whole, width)).sum(dim=-1)
    tail = shares[:, whole * width :]
    return torch.cat([sums, tail.sum(dim=-1, keepdim=True)], dim=-1) if tail.shape[-1] else sums


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_UNIT = 2.0**-40
_BELOW_ONE = 1 - 2.0**-53


class Draw(NamedTuple):
    """What was drawn."""

    tokens: Tensor
    """int64 [n]."""
    logprobs: Tensor
    """Of the distribution really drawn from, float32 [n]; not finite for broken logits."""
    kept_tokens: Tensor | None
    """The tokens that truncation left, bool [n, V], where that was asked for and the sampling
    truncates."""


def uniform(seeds: Tensor, counts: Tensor) -> Tensor:
    """Multiples of 2^-40 in [0, 1), float64 [n], splitmix64 (Steele et al. 2014) of seeds and
    counts [n].
    """
    z = seeds + (counts + 1) * _GOLDEN
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _FIRST
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _SECOND
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    return ((z >> 24) & 0xFFFFFFFFFF).double() * _UNIT


def draw(
    logits: Tensor,
    sampling: Sampling | RowSampling,
    seeds: Tensor,
    counts: Tensor,
    *,
    seen: Tensor | None = None,
    keep: bool = False,
) -> Draw:
    """The next token of each row of logits [n, V], without waiting for the device.

    seeds, counts: int64 [n], of each rollout, and how many tokens it has drawn. seen: bool [n, V],
    tokens that stand in each row; needed for a repetition penalty (ValueError without it).
    keep: also return which tokens truncation left. Can be captured in a CUDA graph when the knobs
    are columns on the device already.
    """
    knobs = columns_of(sampling, logits)
    scores = _scaled(logits, knobs, seen)
    if knobs.kind.all_greedy:
        best, tokens = scores.max(dim=-1)
        return Draw(tokens, best - best, _only(tokens[:, None], scores) if keep else None)
    shares = torch.softmax(scores, dim=-1)
    gone = left_out(scores, shares, knobs)
    if gone is not None:
        shares.masked_fill_(gone, 0)
    tokens, logprobs = _pick(shares, uniform(seeds, counts))
    mask = None
    if keep and (knobs.kind.greedy or knobs.kind.leaves_out):
        mask = torch.ones_like(scores, dtype=torch.bool) if gone is None else ~gone
    if knobs.greedy is not None:
        best, likeliest = scores.max(dim=-1)
        greedy = knobs.greedy[:, 0]
        tokens = torch.where(greedy, likeliest, tokens)
        logprobs = torch.where(greedy, best - best, logprobs)
        if mask is not None:
            mask = torch.where(knobs.greedy, _only(likeliest[:, None], scores), mask)
    return Draw(tokens, logprobs, mask)


def likeliest(
    logits: Tensor, sampling: Sampling | RowSampling, count: int, *, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of the distribution that `draw` draws from, int64 [n, count], and their
    log-probabilities.

    Those that could not be drawn have minus infinity.
    """
    knobs = columns_of(sampling, logits)
    scores = _scaled(logits, knobs, seen)
    shares = torch.softmax(scores, dim=-1)
    gone = None if knobs.kind.all_greedy else left_out(scores, shares, knobs)
    if gone is not None:
        shares.masked_fill_(gone, 0)
    if knobs.greedy is not None:
        only = _only(scores.argmax(dim=-1, keepdim=True), scores).float()
        shares = torch.where(knobs.greedy, only, shares)
    best = torch.topk(shares, min(count, shares.shape[-1]), dim=-1)
    return best.indices, (
        best.values / shares.sum(dim=-1, keepdim=True, dtype=torch.float64)
    ).log().float()


def columns_of(sampling: Sampling | RowSampling, logits: Tensor) -> RowSampling:
    """The knobs on the device of the logits."""
    return (
        sampling if isinstance(sampling, RowSampling) else RowSampling.of([sampling], logits.device)
    )


def _only(tokens: Tensor, like: Tensor) -> Tensor:
    """True at one token of each row: tokens [n, 1], result bool [n, V]."""
    return torch.arange(like.shape[-1], device=like.device) == tokens


def _scaled(logits: Tensor, knobs: RowSampling, seen: Tensor | None) -> Tensor:
    """Logits after penalty and temperature, float32 [n, V]."""
    logits = logits.float()
    penalty = knobs.repetition_penalty
    if penalty is not None:
        if seen is None:
            raise ValueError(
                "repetition_penalty needs the tokens of each row; found seen=None; give seen [n, V]"
            )
        logits = torch.where(
            seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits
        )
    return logits if knobs.temperature is None else logits / knobs.temperature


def _pick(shares: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which the distribution function passes the noise [n], int64 [n], and its
    log-probability [n].

    shares: [n, V], at least 0, need not add up to 1. The function is inverted over blocks first,
    then within one, so that float64 sums run over B + W numbers of a row instead of V.
    """
    vocabulary = shares.shape[-1]
    width = block_width(vocabulary)
    sums = block_sums(shares)
    ends = sums.cumsum(-1, dtype=torch.float64)
    total = ends[:, -1:]
    mark = noise[:, None] * total
    block = torch.searchsorted(ends, mark, right=True).clamp_(max=sums.shape[-1] - 1)
    size = sums.gather(-1, block)
    fraction = (1 - (ends.gather(-1, block) - mark) / size).clamp_(0, _BELOW_ONE)
    at = block * width + torch.arange(width, device=shares.device)
    part = shares.gather(-1, at.clamp(max=vocabulary - 1))
    if vocabulary % width:
        part = part.masked_fill_(at >= vocabulary, 0)
    ends = part.cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(ends, fraction * ends[:, -1:], right=True).clamp_(max=width - 1)
    logprobs = (part.gather(-1, place) / total).log().float()
    return at.gather(-1, place).clamp_(max=vocabulary - 1)[:, 0], logprobs[:, 0]
