"""Runs seeds one after the other; a broken law says how to repeat it."""

import re
from collections.abc import Iterable

from .channels import ChannelWorld
from .laws import Broken
from .world import World


def hold(kind: type[World] | type[ChannelWorld], seeds: Iterable[int]) -> None:
    """All laws hold for these seeds. AssertionError: which does not, and the command that repeats it."""
    law, seed = first_broken(kind, seeds)
    more = " --channels" if kind is ChannelWorld else ""
    assert law is None, f"{law}\nrepeat it with: python -m tests.simulation --seed {seed}{more}"


def first_broken(kind: type[World] | type[ChannelWorld], seeds: Iterable[int]) -> tuple[str | None, int]:
    """The first law that is broken, and by which seed; None, and the last seed."""
    seed = -1
    for seed in seeds:
        try:
            kind(seed).run()
        except Broken as law:
            return str(law), seed
    return None, seed


def notice(kind: type[World] | type[ChannelWorld], within: int, found: str) -> None:
    """One of so many seeds breaks a law, and says so in words that `found` matches."""
    law, seed = first_broken(kind, range(within))
    assert law is not None, f"no seed up to {seed} noticed it"
    assert re.search(found, law), law
