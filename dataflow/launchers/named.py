"""Launchers by the name that `--on` gives them."""

import os
from collections.abc import Callable, Mapping

from dataflow.agent.host_program import HOSTED
from dataflow.errors import GraphError, nearest
from dataflow.launchers.launcher import Launcher
from dataflow.launchers.local import Local, local
from dataflow.launchers.ray_launcher import ray
from dataflow.launchers.slurm import Slurm
from dataflow.launchers.torchrun import Torchrun, become_agent
from dataflow.limits import Limits
from dataflow.planning.hosts import Host


def _local(wish: str) -> Launcher:
    if not wish.isdecimal():
        raise GraphError(
            f"--on local says how many hosts, but got {wish!r}; write it as --on local:3"
        )
    return local(int(wish))


def _ray(wish: str) -> Launcher:
    if wish and not wish.isdecimal():
        raise GraphError(
            f"--on ray says how many hosts, or nothing for all that there are, but got {wish!r};"
            " write it as --on ray:3"
        )
    return ray(hosts=int(wish) if wish else None)


def _slurm(wish: str) -> Launcher:
    _nothing("slurm", wish)
    return Slurm()


def _torchrun(wish: str) -> Launcher:
    _nothing("torchrun", wish)
    if HOSTED.get() is None:
        become_agent(os.environ, Limits().start_s)
    return Torchrun()


def _nothing(name: str, wish: str) -> None:
    if wish:
        raise GraphError(
            f"--on {name} takes all hosts that it is started on, but got {wish!r}; write --on"
            f" {name}"
        )


LAUNCHERS: Mapping[str, Callable[[str], Launcher]] = {
    "local": _local,
    "ray": _ray,
    "slurm": _slurm,
    "torchrun": _torchrun,
}
"""By name; each gets what stands behind the colon."""


def known_hosts(launcher: Launcher) -> list[Host]:
    """Its hosts, before any has joined. Errors: GraphError where only they know what they have."""
    if isinstance(launcher, Local):
        return launcher.parts()
    raise GraphError(
        "what the hosts have is known once they have joined, so there is no plan to look at before;"
        " start the run: its plan is in config.json and graph.svg of its folder"
    )


def launcher_named(text: str) -> Launcher:
    """`local:3` as a launcher; of torchrun's processes rank 0 gets one, others become agents.
    Errors: GraphError."""
    name, _, wish = text.partition(":")
    if name not in LAUNCHERS:
        raise GraphError(
            f"--on is {text!r}, but there are the launchers"
            f" {sorted(LAUNCHERS)}{nearest(name, LAUNCHERS)}; name one of these, or leave it out to"
            " run on this machine"
        )
    return LAUNCHERS[name](wish)
