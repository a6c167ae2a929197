"""An environment with Gymnasium's methods, behind Gymnasium's adapter: it counts its instances in a
folder, and for some seeds it goes wrong, once for each.
"""

import os
import signal
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from operators.environments.gymnasium_form import GymnasiumSession
from operators.environments.session import SYSTEMS, System

LETTERS = "abcdefghijklm"


"""Of which each is worth 1 where the policy's turn begins with it."""


TURNS = 2


WRONG = ("raise", "hang", "die", "shout", "not a number", "over")


EVERY = 5


"""One seed of so many goes wrong."""


def known(monkeypatch: Any) -> None:
    """Let `environment("gym-shaped:...")` be one."""
    monkeypatch.setitem(
        SYSTEMS, "gym-shaped", System(module="rigs.worlds.gym_shaped", package="json", extra="none")
    )


def wrong_for(seed: int) -> str | None:
    """What goes wrong for a seed, the first time."""
    found = zlib.crc32(str(seed).encode()) % (EVERY * len(WRONG))
    return WRONG[found] if found < len(WRONG) else None


class GymShaped:
    """Turns that are worth something by their first letter."""

    def __init__(self, folder: Path, *, goes_wrong: bool) -> None:
        self._folder, self._goes_wrong = folder, goes_wrong
        self._mark = folder / f"{os.getpid()}-{time.monotonic_ns()}.env"
        self._mark.write_text("open")
        self._seed = self._left = 0

    def reset(
        self, *, seed: int, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._seed, self._left = seed, TURNS
        return f"{seed}=", {}

    def step(self, action: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        self._left -= 1
        match self._wrong():
            case "raise":
                raise KeyError("the world is broken")
            case "hang":
                time.sleep(60)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "shout":
                return "a" * (10 << 20), 1.0, False, False, {}
            case "not a number":
                return "", float("nan"), True, False, {}
            case "over":
                return "", None, True, False, {}
        return f"{action[:1]}=", float(action[:1] in LETTERS), not self._left, False, {}

    def close(self) -> None:
        self._mark.write_text("closed")

    def _wrong(self) -> str | None:
        wrong = wrong_for(self._seed) if self._goes_wrong else None
        if wrong is None or self._left != (TURNS - 1 if wrong == "over" else 0):
            return None
        try:
            with (self._folder / f"{self._seed}.wrong").open("x") as mark:
                mark.write(f"{wrong}:{os.getpid()}")
        except FileExistsError:
            return None
        return wrong


def make(name: str, *, folder: str, goes_wrong: bool = False) -> GymnasiumSession:
    return GymnasiumSession(GymShaped(Path(folder), goes_wrong=goes_wrong), ())


def as_said(said: str) -> str:
    """The action: what was said."""
    return said


def instances(folder: Path) -> int:
    """How many were ever made."""
    return len(list(folder.glob("*.env")))


def left_open(folder: Path) -> list[int]:
    """The processes of those that nobody has closed."""
    return [
        int(mark.name.split("-")[0]) for mark in folder.glob("*.env") if mark.read_text() == "open"
    ]


def gone_wrong(folder: Path) -> list[tuple[str, int]]:
    """What went wrong, and in which process."""
    found = (mark.read_text().split(":") for mark in folder.glob("*.wrong"))
    return [(wrong, int(pid)) for wrong, pid in found]
