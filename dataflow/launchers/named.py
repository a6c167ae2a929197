"""Launchers by the name that `--on` gives them."""

from collections.abc import Callable, Mapping

from dataflow.errors import GraphError, nearest
from dataflow.launchers.launcher import Launcher
from dataflow.launchers.local import local


def _local(wish: str) -> Launcher:
    if not wish.isdecimal():
        raise GraphError(f"--on local says how many hosts, but got {wish!r}; write it as --on local:3")
    return local(int(wish))


LAUNCHERS: Mapping[str, Callable[[str], Launcher]] = {"local": _local}
"""By name; each gets what stands behind the colon."""


def launcher_named(text: str) -> Launcher:
    """`local:3` as a launcher. Errors: GraphError."""
    name, _, wish = text.partition(":")
    if name not in LAUNCHERS:
        raise GraphError(
            f"--on is {text!r}, but there are the launchers {sorted(LAUNCHERS)}{nearest(name, LAUNCHERS)}; name one of "
            f"these, or leave it out to run on this machine"
        )
    return LAUNCHERS[name](wish)
