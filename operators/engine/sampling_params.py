"""How next tokens are drawn from logits: the knobs of one row, and those of many as columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


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

    @property
    def truncates(self) -> bool:
        """Whether any token may be left out."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """One Sampling per row, as columns [n, 1]; None where no row uses the knob, known without
    asking the device.

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
    widest: int
    """The largest top_k."""
    all_greedy: bool
    truncates: bool
    """Whether any token of any row may be left out."""

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device | str) -> RowSampling:
        """Bring these onto the device, one per row."""

        def column(
            values: list[float], off: float, dtype: torch.dtype = torch.float32
        ) -> Tensor | None:
            if all(value == off for value in values):
                return None
            # filled on the device: a copy from the host cannot be captured in a CUDA graph
            if len(values) == 1:
                return torch.full((1, 1), values[0], dtype=dtype, device=device)
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        greedy = [s.temperature == 0 for s in samplings]
        return cls(
            temperature=column([s.temperature or 1.0 for s in samplings], 1.0),
            greedy=column([float(g) for g in greedy], 0.0, torch.bool),
            top_k=column([s.top_k for s in samplings], 0, torch.int64),
            top_p=column(
                [s.top_p if s.top_p < 1 else math.inf for s in samplings], math.inf, torch.float64
            ),
            min_p=column([s.min_p for s in samplings], 0.0),
            repetition_penalty=column([s.repetition_penalty for s in samplings], 1.0),
            widest=max((s.top_k for s in samplings), default=0),
            all_greedy=all(greedy),
            truncates=any(s.truncates for s in samplings),
        )

    def select(self, rows: Tensor) -> RowSampling:
        """These rows, int64 or bool index, in this order; a knob that none of them uses may still
        be a column.
        """
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        columns |= {
            name: column[rows] for name, column in columns.items() if isinstance(column, Tensor)
        }
        return RowSampling(**columns)
