"""What share of its data sheet a system reaches, and what nobody's data sheet says: the constants of every cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Constants; two of them are fitted to runs, the others are stated assumptions."""

    memory: float = 0.6
    """Share of the memory's bandwidth, and of every link's, that is reached."""
    compute: float = 0.3
    """Share of the rate of matrix products."""
    exchange_s: float = 12e-6
    """Seconds of an all-reduce of few bytes within a node."""
    far_exchange_s: float = 40e-6
    """The same over several nodes."""
    step_s: float = 3e-3
    """Of a decode step besides the model: scheduling and drawing."""
    cache_share: float = 0.85
    """Of a device's memory that weights and cache may take."""
    most_rollouts: int = 1024
    """That a replica decodes at once."""
    source: str = "assumed; not fitted to any run"


ASSUMED = Rates()
