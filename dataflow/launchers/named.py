"""Launchers by the name that `--on` gives them."""

from collections.abc import Callable, Mapping

from dataflow.errors import GraphError, nearest
from dataflow.launchers.launcher import Launcher
from dataflow.launchers.local import Local, local
from dataflow.planning.hosts import Host


def _local(wish: str) -> Launcher:
    if not wish.isdecimal():
        raise GraphError(f"--on local says how many hosts, but got {wish!r}; write it as --on local:3")
    return local(int(wish))


LAUNCHERS: Mapping[str, Callable[[str], Launcher]] = {"local": _local}
"""By name; each gets what stands behind the colon."""


def known_hosts(launcher: Launcher) -> list[Host]:
    """Its hosts, before any has joined. Errors: GraphError where only they know what they have."""
    if isinstance(launcher, Local):
        return launcher.parts()
    raise GraphError(
        "what the hosts have is known once they have joined, so there is no plan to look at before; start the run: "
        "its plan is in config.json and graph.svg of its folder"
    )


def launcher_named(text: str) -> Launcher:
    """`local:3` as a launcher. Errors: GraphError."""
    name, _, wish = text.partition(":")
    if name not in LAUNCHERS:
        raise GraphError(
            f"--on is {text!r}, but there are the launchers {sorted(LAUNCHERS)}{nearest(name, LAUNCHERS)}; name one of "
            f"these, or leave it out to run on this machine"
        )
    return LAUNCHERS[name](wish)
