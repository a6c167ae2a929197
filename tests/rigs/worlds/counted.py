"""An environment of the tests' own, as adapters have them: counts its sessions in a folder, fails
as its task says.
"""

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from operators.environments.session import SYSTEMS, InvalidAction, Seen, System
from rigs.machine import alive
from rigs.worlds import LETTERS

NAME = "counted"


def known(monkeypatch: Any) -> None:
    """Let `environment("counted:...")` be one."""
    monkeypatch.setitem(
        SYSTEMS, NAME, System(module="rigs.worlds.counted", package="json", extra="none")
    )


class CountedSession:
    """Turns as its task says; each begins with a number that the seed makes."""

    def __init__(self, folder: Path) -> None:
        self._mark = folder / f"{os.getpid()}-{time.monotonic_ns()}"
        self._mark.write_text("open")
        self._task: Mapping[str, Any] = {}
        self._left = 0

    async def reset(self, task: Mapping[str, Any], seed: int) -> Seen:
        self._task, self._left = task, int(task.get("turns", 2))
        if task.get("over"):
            return Seen(terminated=True)
        return Seen(raw=f"{seed}=", text=f"{seed}=")

    def read(self, said: str) -> str:
        if self._task.get("strict") and said[:1] not in LETTERS:
            raise InvalidAction("say a letter")
        return said

    async def step(self, action: str) -> Seen:
        once = self._task.get("kills_once")
        if once is not None and self._left == 1 and not Path(once).exists():
            Path(once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        match self._task.get("does"):
            case "raise":
                raise KeyError("the world is broken")
            case "hang":
                time.sleep(60)
            case "wait":
                await asyncio.sleep(60)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "shout":
                return Seen(text="a" * (10 << 20), reward=1.0)
            case "lie":
                return Seen(reward=float("nan"), terminated=True)
            case "mute":
                return Seen(terminated=True)
        self._left -= 1
        is_cut = bool(self._task.get("cut")) and not self._left
        return Seen(
            raw=action[:1],
            text=f"{action[:1]}=",
            reward=float(action[:1] in LETTERS),
            terminated=not self._left and not is_cut,
            truncated=is_cut,
        )

    async def close(self) -> None:
        self._mark.write_text("closed")


def make(name: str, *, folder: str) -> CountedSession:
    return CountedSession(Path(folder))


def opened(folder: Path) -> list[Path]:
    """Sessions that nobody has closed."""
    return [mark for mark in folder.iterdir() if mark.read_text() == "open"]


def held(folder: Path) -> list[Path]:
    """Of these, those whose process lives: with it ends what a session has."""
    return [mark for mark in opened(folder) if alive([int(mark.name.split("-")[0])])]
