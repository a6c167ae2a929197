"""What a launcher and the process that speaks to Ray for it say to each other."""

from collections.abc import Mapping
from typing import TypeAlias

from dataflow.system.messages import Codec, Message, Natural, Plain, Secret


class Connect(Message, kw_only=True):
    """Become a driver of a cluster."""

    address: str
    hosts: Natural
    """0: all that there are."""
    cpus: int
    gpus: int
    """-1: as many as the smallest of the hosts has."""
    resources: Mapping[str, Plain]
    runtime_env: Mapping[str, Plain]
    wait_s: float


class Connected(Message, kw_only=True):
    """The cluster is there."""

    hosts: Natural
    listen: str
    """This machine's address, as the cluster reaches it."""


class PlaceAgents(Secret, kw_only=True):
    """Have an agent on each host."""

    name: str
    """Of the placement group."""
    scheduler: str
    folder: str
    keys: bytes
    """All three: see `Joining`."""


class AgentEnded(Message):
    """One agent has ended by itself, or cannot be had: why."""

    why: str


class Wrong(Message):
    """It cannot go on: what is wrong, for people."""

    error: str


RayMessage: TypeAlias = Connect | PlaceAgents | Connected | AgentEnded | Wrong
RAY: Codec[RayMessage] = Codec(
    "dataflow.ray-driver", 1, Connect, PlaceAgents, Connected, AgentEnded, Wrong
)
