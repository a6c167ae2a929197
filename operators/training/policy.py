"""The model as the trainer sees it: log-probabilities of a packed micro-batch's tokens; imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from operators.packing import Array, Kept, Packed, pack

ATTENTION = "dataflow_packed"
PROBE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Rows:
    """The attention rows of a packed micro-batch, on the device: an argument of `packed_attention`."""

    buckets: tuple[Tensor, ...]
    """Node indices int64 [B, L], right padded."""
    back_N: Tensor
    """Where each node's output stands in the buckets, end to end."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: Rows,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Causal attention within rows gathered from the nodes by index; an attention function of transformers.

    query, key, value: [1, heads, N, D]. Returns [1, N, heads, D]. Padding stands at the right of the rows,
    where no token before it sees it, so a full-attention layer needs no mask. Raises ValueError for variants
    that it does not compute (soft caps, sinks, biases).
    """
    for unknown in ("softcap", "s_aux", "position_bias"):
        if rest.get(unknown) is not None:
            raise ValueError(f"packed attention does not compute '{unknown}'")
    query_N_H_D, key_N_H_D, value_N_H_D = (x[0].transpose(0, 1) for x in (query, key, value))
    is_grouped = query.shape[1] != key.shape[1]
    outputs = []
    for bucket_B_L in packed_rows.buckets:
        batch, length = bucket_B_L.shape
        index = bucket_B_L.view(-1)
        rows = [
            x.index_select(0, index).view(batch, length, *x.shape[1:]).transpose(1, 2)
            for x in (query_N_H_D, key_N_H_D, value_N_H_D)
        ]
        mask = None
        if sliding_window is not None and sliding_window < length:
            at = torch.arange(length, device=query.device)
            mask = (at[:, None] >= at) & (at[:, None] - at < sliding_window)
        out = F.scaled_dot_product_attention(
            rows[0], rows[1], rows[2],
            attn_mask=mask, is_causal=mask is None, dropout_p=dropout, scale=scaling, enable_gqa=is_grouped,
        )  # fmt: skip
        outputs.append(out.transpose(1, 2).reshape(batch * length, out.shape[1], out.shape[3]))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat.index_select(0, packed_rows.back_N)[None], None


@dataclass(frozen=True)
class _Left:
    """Distributions of M tokens over what truncation left of the vocabulary."""

    tokens_M: Tensor
    """Which of the T trained tokens they are."""
    segment_K: Tensor
    """Index into M of each id."""
    values_K: Tensor
    """Its logit."""
    normalizer_M: Tensor
    """Log of the sum of the exponentials."""

    @classmethod
    def of(cls, tokens_M: Tensor, segment_K: Tensor, values_K: Tensor) -> _Left:
        """Normalise each."""
        given_K = values_K.detach()
        most_M = given_K.new_zeros(len(tokens_M)).scatter_reduce_(0, segment_K, given_K, "amax", include_self=False)
        powers_K = (values_K - most_M[segment_K]).exp()
        normalizer_M = most_M + powers_K.new_zeros(len(tokens_M)).index_add(0, segment_K, powers_K).log()
        return cls(tokens_M, segment_K, values_K, normalizer_M)

    def entropy_M(self) -> Tensor:
        """Entropy in nats."""
        shares_K = (self.values_K - self.normalizer_M[self.segment_K]).exp()
        none_M = torch.zeros_like(self.normalizer_M)
        return self.normalizer_M - none_M.index_add(0, self.segment_K, shares_K * self.values_K)


class Policy:
    """A causal language model that gives log-probabilities of trained tokens."""

    def __init__(
        self,
        module: Any,
        *,
        temperature: float = 1.0,
        compute: torch.dtype | None = None,
        packed: bool | None = None,
    ) -> None:
        """module: in eval mode (prefixes can be shared only without dropout).

        temperature: that the rollouts were sampled at. compute: type of the matrix products under autocast;
        None: that of the weights. packed: whether nodes go through the model without padding; None: where a
        probe shows that the model's log-probabilities stay what they were.
        """
        self.module = module
        self.temperature = temperature
        self._device = next(module.parameters()).device
        self._compute = compute
        self.packs = False
        if packed is None or packed:
            self.packs = self._switch_to_packed(must=bool(packed))

    def computed(self, packed: Packed, kept_T: Kept | None, wanted: Collection[str]) -> dict[str, Tensor]:
        """`new_logprobs` and, where wanted, `entropy`; see `logprobs`."""
        logprobs_T, entropy_T = self.logprobs(packed, kept_T, entropy="entropy" in wanted)
        return {"new_logprobs": logprobs_T} | ({} if entropy_T is None else {"entropy": entropy_T})

    def logprobs(
        self, packed: Packed, kept_T: Kept | None = None, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [T] of the trained tokens and, where asked for, the entropy [T] in nats.

        kept_T: the ids that truncation left at each of them; both numbers are then those of the distribution over
        these ids alone, so that with the generator's weights they are the generator's, whatever top-k, top-p or min-p
        it used. A repetition penalty changes the logits themselves and is not undone: with one, the
        log-probabilities of trainer and generator differ, and the loss's importance ratio has to make up for it.
        """
        logits_U_V = self._logits(packed)
        if logits_U_V.dtype in (torch.bfloat16, torch.float16):
            logits_U_V = logits_U_V.float()
        if self.temperature != 1.0:
            logits_U_V = logits_U_V / self.temperature
        normalizer_U = logits_U_V.logsumexp(-1)
        head_T, targets_T = self._to(packed.head_T), self._to(packed.targets_T)
        normalizer_T = normalizer_U[head_T]
        left = None if kept_T is None else self._left(logits_U_V, head_T, kept_T)
        if left is not None:
            normalizer_T = normalizer_T.index_copy(0, left.tokens_M, left.normalizer_M)
        logprobs_T = logits_U_V[head_T, targets_T] - normalizer_T
        if not entropy:
            return logprobs_T, None
        shares_U_V = (logits_U_V - normalizer_U[:, None]).exp()
        entropy_T = (normalizer_U - (shares_U_V * logits_U_V).sum(-1))[head_T]
        return logprobs_T, entropy_T if left is None else entropy_T.index_copy(0, left.tokens_M, left.entropy_M())

    def _left(self, logits_U_V: Tensor, head_T: Tensor, kept_T: Kept) -> _Left:
        """The logits at the ids that truncation left."""
        lengths_T = np.diff(kept_T.offsets)
        masked = np.flatnonzero(lengths_T)
        tokens_M = self._to(masked)
        segment_K = self._to(np.repeat(np.arange(len(masked)), lengths_T[masked]))
        values_K = logits_U_V[head_T[tokens_M][segment_K], self._to(kept_T.ids_K).long()]
        return _Left.of(tokens_M, segment_K, values_K)

    def _logits(self, packed: Packed) -> Tensor:
        """Logits [U, V] at the nodes that trained tokens are predicted from."""
        autocast: Any = contextlib.nullcontext()
        if self._compute is not None:
            autocast = torch.autocast(self._device.type, dtype=self._compute)
        with autocast:
            return self._packed_logits(packed) if self.packs else self._padded_logits(packed)

    def _packed_logits(self, packed: Packed) -> Tensor:
        rows = Rows(tuple(self._to(bucket) for bucket in packed.buckets), self._to(packed.back_N))
        out = self.module(
            input_ids=self._to(packed.tokens_N)[None],
            position_ids=self._to(packed.positions_N)[None],
            use_cache=False,
            logits_to_keep=self._to(packed.heads_U),
            packed_rows=rows,
        )
        return out.logits[0]  # type: ignore[no-any-return]

    def _padded_logits(self, packed: Packed) -> Tensor:
        """The same through right-padded rows, for models whose attention cannot be replaced."""
        tokens_N = self._to(packed.tokens_N)
        logits = []
        for bucket in packed.buckets:
            out = self.module(input_ids=tokens_N[self._to(bucket)], use_cache=False)
            logits.append(out.logits.flatten(0, 1))
        return torch.cat(logits)[self._to(packed.back_N[packed.heads_U])]

    def _to(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _switch_to_packed(self, must: bool) -> bool:
        """Replace the model's attention, unless a probe shows that its log-probabilities would change."""
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, packed_attention)
        was = self.module.config._attn_implementation
        if was == ATTENTION:
            return True
        probe = _probe(int(self.module.config.get_text_config().vocab_size))
        with torch.no_grad():
            wanted, _ = self.logprobs(probe)
            try:
                self.module.set_attn_implementation(ATTENTION)
                self.packs = True
                found, _ = self.logprobs(probe)
                if bool(((found - wanted).abs() <= PROBE_TOLERANCE).all()):
                    return True
            except Exception:  # any refusal means the same: this architecture keeps its own attention
                if must:
                    raise
        self.packs = False
        self.module.set_attn_implementation(was)
        if must:
            raise ValueError(f"{type(self.module).__name__} gives other log-probabilities when packed")
        return False


def _probe(vocabulary: int) -> Packed:
    """Three rollouts that share a prefix, and one that does not."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, vocabulary, size) for size in (12, 9, 15, 7)]
    for row in rows[1:3]:
        row[:6] = rows[0][:6]
    offsets = np.r_[0, np.cumsum([len(row) for row in rows])]
    return pack(np.concatenate(rows), np.ones(int(offsets[-1]), bool), offsets)
