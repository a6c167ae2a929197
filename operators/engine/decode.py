"""The decode step: one forward pass over all active rows and the new prompts, one draw, the finished rows.

Axes: S slots, n active rows, T positions, k finished rows, m rows that start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dataflow.records import AnyArray
from operators.engine.attention import Layout, NewPrompts
from operators.engine.kv_cache import KVCache
from operators.engine.sampler import Sampling, draw

STOPPED, TOO_LONG, BROKEN = 0, 1, 2
"""Why a row finished: an end token or stop string, its length limit, logits that are not finite."""


FIRST_TOKENS = 32
"""Positions per slot that the cache begins with."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A prompt whose rollouts (all, or some) start in this step."""

    prompt: AnyArray
    """Its tokens, int64 [at least 1]."""
    limit: int
    """Most tokens of prompt and completion together."""
    tickets: Sequence[int]
    """The caller's number of each rollout."""
    seeds: Sequence[int]
    """Of each rollout, int64."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Rows that ended in a step, as arrays over the k rows."""

    tickets: AnyArray
    """int64 [k]."""
    tokens: AnyArray
    """Prompt and completion, int32 [k, longest], right-padded."""
    logprobs: AnyArray
    """float32 [k, longest]."""
    versions: AnyArray
    """int32 [k, longest]."""
    starts: AnyArray
    """Tokens of the prompt, int64 [k]."""
    lengths: AnyArray
    """Tokens of prompt and completion, int64 [k]."""
    reasons: AnyArray
    """STOPPED, TOO_LONG or BROKEN, int64 [k]."""
    texts: dict[int, str]
    """By ticket: the completion before its stop string, for those that ended at one."""


class Engine:
    """Slots and the sequences in them; knows tokens, not prompts' rows, groups or lanes."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        slots: int,
        context_tokens: int,
        sampling: Sampling,
        end_tokens: Sequence[int],
        may_stop: torch.Tensor | None = None,
        find_stop: Callable[[AnyArray], str | None] | None = None,
        kernel: Callable[..., None] | None = None,
    ) -> None:
        """Prepare `slots` slots for sequences of at most `context_tokens` tokens.

        Args:
            may_stop: bool [V], tokens after which `find_stop` is asked; None: no stop strings.
            find_stop: from the completion's tokens to its text before the stop string, or None.
            kernel: `native.kernel()` for a float32 model on the CPU, None to attend with torch's operators.
        """
        self.model = model
        self.slots = slots
        self.context_tokens = context_tokens
        self.sampling = sampling
        self.version = 0
        self.active = 0
        self.steps = 0
        self.drawn = 0
        self.device = next(model.parameters()).device
        self._find_stop = find_stop
        self._kernel = kernel
        self._vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
        checked = torch.zeros(self._vocabulary, dtype=torch.bool)
        checked[[token for token in end_tokens if 0 <= token < self._vocabulary]] = True
        self._ends = checked.numpy().copy()
        if may_stop is not None:
            checked = checked | may_stop
        self._checked = checked.to(self.device)
        first = min(context_tokens, FIRST_TOKENS)
        self.cache = KVCache(slots, first, context_tokens)
        self._tokens = self._table(torch.int32)
        self._logprobs = self._table(torch.float32)
        self._versions = self._table(torch.int32)
        self._last = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self._length = torch.zeros_like(self._last)
        self._start = torch.zeros_like(self._last)
        self._limit = torch.zeros_like(self._last)
        self._seed = torch.zeros_like(self._last)
        self._ticket = np.zeros(slots, dtype=np.int64)
        self._holes = np.zeros(0, dtype=np.int64)
        self._rows = torch.arange(slots, device=self.device)
        self._slot = self._rows.clone()
        self._longest = 0

    @property
    def free(self) -> int:
        """Slots that a rollout may start in."""
        return self.slots - self.live

    @property
    def live(self) -> int:
        """Rows that have not ended."""
        return self.active - len(self._holes)

    @torch.inference_mode()
    def step(self, starts: Sequence[Start] = ()) -> Finished | None:
        """Draw one token for every active row and the first token of every row that starts.

        Returns the rows that ended, or None. The rows of `starts` must fit into `free`.
        """
        self._close_holes()
        if not self.active and not starts:
            return None
        layout, tokens, positions, kept = self._input(starts)
        logits = self._forward(tokens, positions, kept, layout)
        if layout.prompts is not None:
            logits = logits[torch.cat([self._rows[: self.active], layout.prompts.origin + self.active])]
            self.active = len(logits)
        n = self.active
        length = self._length[:n]
        chosen, logprob = draw(logits, self.sampling, self._seed[:n], length - self._start[:n])
        flat = self._rows[:n] * self.cache.tokens + length
        self._tokens.view(-1).index_copy_(0, flat, chosen.int())
        self._logprobs.view(-1).index_copy_(0, flat, logprob)
        self._versions.view(-1).index_fill_(0, flat, self.version)
        self._last[:n] = chosen
        length += 1
        self._longest += 1
        self.steps += 1
        self.drawn += n
        over = self._checked[chosen] | (length >= self._limit[:n]) | ~logprob.isfinite()
        rows = over.nonzero()[:, 0]
        return self._take(rows) if len(rows) else None

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor | int, layout: Layout
    ) -> torch.Tensor:
        """Logits [rows, V] of the tokens named by `kept` in the flattened row [N]."""
        output: Any = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=kept,
            slot_layout=layout,
        )
        return output.logits[0]  # type: ignore[no-any-return]

    def _input(self, starts: Sequence[Start]) -> tuple[Layout, torch.Tensor, torch.Tensor, torch.Tensor | int]:
        """The flattened row of this step: its layout, tokens [N], positions [N] and which logits to keep."""
        n = self.active
        positions = self._length[:n] - 1
        if not starts:
            return self._layout(positions, None), self._last[:n], positions, 0
        lengths = np.array([len(start.prompt) for start in starts])
        counts = np.array([len(start.tickets) for start in starts])
        self._reserve(max(start.limit for start in starts))
        longest = int(lengths.max())
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        at = np.arange(longest)
        padded = np.minimum(offsets[:-1, None] + at, offsets[1:, None] - 1)
        packed = np.nonzero((at < lengths[:, None]).ravel())[0]
        origin = np.repeat(np.arange(len(starts)), counts)
        rows = slice(n, n + len(origin))
        flat = np.concatenate([start.prompt for start in starts])
        put = self._put
        tokens = put(flat)
        padded_on = put(padded)
        origin_on = put(origin)
        self._tokens[rows, :longest] = tokens[padded_on][origin_on].int()
        self._logprobs[rows, :longest] = 0.0
        self._versions[rows, :longest] = -1
        self._start[rows] = self._length[rows] = put(lengths[origin])
        self._limit[rows] = put(np.repeat([start.limit for start in starts], counts))
        self._seed[rows] = put(np.array([seed for start in starts for seed in start.seeds], dtype=np.int64))
        self._ticket[rows] = [ticket for start in starts for ticket in start.tickets]
        new = NewPrompts(padded=padded_on, packed=put(packed), slots=self._slot[rows], origin=origin_on)
        layout = self._layout(positions, new)
        last = put(np.concatenate([np.arange(n), n + offsets[1:] - 1]))
        places = put(np.concatenate([np.arange(length) for length in lengths]))
        self._longest = max(self._longest, longest)
        return layout, torch.cat([self._last[:n], tokens]), torch.cat([positions, places]), last

    def _layout(self, positions: torch.Tensor, new: NewPrompts | None) -> Layout:
        slots = None if self._kernel is None else self._slot[: len(positions)]
        return Layout(self.cache, positions, self._longest, new, self._kernel, slots)

    def _take(self, rows: torch.Tensor) -> Finished | None:
        """Take the rows that ended out of their slots; rows that only might have hit a stop string stay."""
        picked = rows.cpu().numpy()
        lengths = self._length[rows].cpu().numpy()
        starts = self._start[rows].cpu().numpy()
        longest = int(lengths.max())
        tokens = self._tokens[rows, :longest].cpu().numpy()
        logprobs = self._logprobs[rows, :longest].cpu().numpy()
        last = np.arange(len(picked)), lengths - 1
        broken = ~np.isfinite(logprobs[last])
        stopped = self._ends[tokens[last]] & ~broken
        too_long = lengths >= self._limit[rows].cpu().numpy()
        texts: dict[int, str] = {}
        if self._find_stop is not None:
            for i in np.nonzero(~broken & ~stopped)[0]:
                text = self._find_stop(tokens[i, starts[i] : lengths[i]])
                if text is not None:
                    texts[int(self._ticket[picked[i]])] = text
                    stopped[i] = True
        ended = broken | stopped | too_long
        if not ended.any():
            return None
        if broken.any():
            self.cache.clear(self._slot[rows[self._put(broken)]])
        reasons = np.where(broken, BROKEN, np.where(stopped, STOPPED, TOO_LONG))
        self._holes = picked[ended]
        return Finished(
            tickets=self._ticket[picked[ended]],
            tokens=tokens[ended],
            logprobs=logprobs[ended],
            versions=self._versions[rows, :longest].cpu().numpy()[ended],
            starts=starts[ended],
            lengths=(lengths - broken)[ended],
            reasons=reasons[ended],
            texts=texts,
        )

    def _close_holes(self) -> None:
        """Move the last active rows into the places of those that ended, so that rows 0 .. n-1 are active.

        The C kernel looks each row's slot up; for torch's operators the keys and values move along.
        """
        holes, n = self._holes, self.active
        if not len(holes):
            return
        left = n - len(holes)
        is_hole = np.zeros(n, dtype=bool)
        is_hole[holes] = True
        target = holes[holes < left]
        origin = np.nonzero(~is_hole[left:])[0] + left
        if len(target):
            to, come = self._put(target), self._put(origin)
            if self._kernel is None:
                self.cache.move(to, come, self._longest)
            else:
                self._slot[torch.cat([to, come])] = self._slot[torch.cat([come, to])]
            for table in (self._tokens, self._logprobs, self._versions):
                table[to, : self._longest] = table[come, : self._longest]
            for column in (self._last, self._length, self._start, self._limit, self._seed):
                column[to] = column[come]
            self._ticket[target] = self._ticket[origin]
        self.active = left
        self._holes = holes[:0]
        self._longest = int(self._length[:left].max()) if left else 0

    def _reserve(self, tokens: int) -> None:
        """Make room for sequences of this many tokens."""
        if tokens <= self.cache.tokens:
            return
        self.cache.grow(tokens)
        for name in ("_tokens", "_logprobs", "_versions"):
            old = getattr(self, name)
            new = self._table(old.dtype)
            new[:, : old.shape[1]] = old
            setattr(self, name, new)

    def _table(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.slots, self.cache.tokens, dtype=dtype, device=self.device)

    def _put(self, values: AnyArray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)
