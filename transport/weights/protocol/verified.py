"""Messages of a reader's first rank to the others about a version that all of them take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class VerifiedOffer:
    """A version that the first rank has verified and holds still."""

    version: int
    segment: str
    """Tells it from every other that was offered under its number: where it lies, or with whom and
    when it came."""
    layout: Mapping[str, Any] | None = None
    """The writer's, in plain values, where the others need one to find their slices, and it is
    another than before."""
