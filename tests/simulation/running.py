"""Runs seeds one after the other; a broken law says how to repeat it."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from .channels import ChannelWorld
from .laws import Broken
from .world import World

Kind = Callable[[int], Any]
"""Makes the world of a seed."""


def having(*features: str) -> Kind:
    """Runs that have these features, whatever the seed would draw."""
    return partial(World, having=features)


def hold(kind: Kind, seeds: Iterable[int]) -> None:
    """All laws hold for these seeds. AssertionError: which does not, and the command that repeats
    it.
    """
    law, seed = first_broken(kind, seeds)
    assert law is None, (
        f"{law}\nrepeat it with: python -m tests.simulation --seed {seed}{_options(kind)}"
    )


def first_broken(kind: Kind, seeds: Iterable[int]) -> tuple[str | None, int]:
    """The first law that is broken, and by which seed; None, and the last seed."""
    seed = -1
    for seed in seeds:
        try:
            kind(seed).run()
        except Broken as law:
            return str(law), seed
    return None, seed


def notice(kind: Kind, seeds: range, found: str) -> None:
    """One of the seeds breaks a law, and says so in words that `found` matches."""
    law, _ = first_broken(kind, seeds)
    assert law is not None, (
        f"no seed from {seeds.start} to {seeds.stop - 1} noticed it; look for one in others"
    )
    assert re.search(found, law), law


def _options(kind: Kind) -> str:
    if kind is ChannelWorld:
        return " --channels"
    features = kind.keywords["having"] if isinstance(kind, partial) else None
    return "" if features is None else " ".join([" --having", *features])
