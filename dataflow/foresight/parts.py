"""Seconds by what they are spent on, so that constants can be fitted without a new computation."""

from __future__ import annotations

from dataclasses import dataclass

from dataflow.foresight.rates import Rates


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds at the full rates of data sheets; they add up, and are multiplied by numbers."""

    memory: float = 0.0
    """Reading weights and cache."""
    compute: float = 0.0
    links: float = 0.0
    """Bytes between devices."""
    fixed: float = 0.0
    """What no rate scales."""

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            memory=self.memory + other.memory,
            compute=self.compute + other.compute,
            links=self.links + other.links,
            fixed=self.fixed + other.fixed,
        )

    def __mul__(self, times: float) -> Parts:
        return Parts(
            memory=self.memory * times,
            compute=self.compute * times,
            links=self.links * times,
            fixed=self.fixed * times,
        )

    def seconds(self, rates: Rates) -> float:
        """At the rates that are reached, of links at most all; one after the other."""
        return (
            self.memory / rates.memory
            + self.links / min(1.0, rates.memory)
            + self.compute / rates.compute
            + self.fixed
        )
