"""One process of a run as `scaling` sees it: its state, its neighbours, what it waits to hear of."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Member:
    """One process of the run."""

    name: str
    worker: str
    replica: int
    state: str = "live"
    """joining | live | leaving | stopping | left"""
    gpus: tuple[int, ...] = ()
    addresses: Mapping[str, str] | None = None
    """Where it receives, by edge, once it has said hello."""
    senders: set[str] = field(default_factory=set)
    """Members that send to it, or have."""
    unconfirmed: dict[int, str] = field(default_factory=dict)
    """Tickets of words about it, and who is to confirm them."""
    wired: bool = False
    wired_again: bool = False
    """Whether it may not have heard every sender's end: the attempt that runs is not the first, or its leave was begun
    by an earlier scheduler, and a sender that never heard of it has none to tell."""
    drained: bool = False

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {
            "senders": sorted(self.senders),
            "unconfirmed": list(self.unconfirmed.items()),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Member":
        """What `to_plain` gave."""
        sets = {
            "senders": set(plain["senders"]),
            "unconfirmed": dict(plain["unconfirmed"]),
            "gpus": tuple(plain["gpus"]),
        }
        return cls(**{**plain, **sets})
