"""A sandbox for each rollout as tools: Python and a shell whose files, variables and folder are
kept over its turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dataflow.errors import WorldFailed, is_whole
from operators.chat.chat_format import Message
from operators.sandbox.bwrap import SandboxError, missing
from operators.sandbox.runner import fault
from operators.sandbox.session import (
    CommandRefused,
    CommandResult,
    KeptLimits,
    KeptSandbox,
    SandboxLost,
)

T = TypeVar("T")
_PYTHON = (
    "Runs Python code in a sandbox. Variables, imports and files are still there in the next call."
    " Gives what the code prints, and the value of its last expression."
)
_SHELL = (
    "Runs a shell command in a sandbox, in the folder that the last one left. Files are still there"
    " in the next call. Gives what it prints."
)
_TOLD = {"python": (_PYTHON, "code", "What to run."), "shell": (_SHELL, "command", "What to run.")}
_LEAST_MB = 64


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Tools `python` and `shell`, in a sandbox that each rollout has for itself: no network, no
    files but its own.
    """

    tools: tuple[str, ...] = ("python", "shell")
    """Which of the two the policy has."""
    at_once: int = 16
    """Most sandboxes that are alive in a process of the episode; who finds none free waits for
    one."""
    ahead: int = 1
    """Sandboxes that are started before anybody asks."""
    memory_mb: int = 512
    """Of all processes of a sandbox together, and address space of each of them."""
    file_mb: int = 64
    """All that it may have in files, in memory."""
    processes: int = 32
    """Processes and threads."""
    folders: tuple[str, ...] = ()
    """Folders of this machine that can be read in it, under their own names."""

    @property
    def is_shared(self) -> bool:
        """A sandbox is of one rollout."""
        return False

    @property
    def uses(self) -> int:
        """A sandbox is of one rollout."""
        return 1

    def faults(self) -> Sequence[str]:
        """What cannot be right, and why no sandbox can be made here."""
        faults = [
            f"Sandbox({knob}={value!r}) is no number that can be; give a whole number of {least} or"
            " more"
            for knob, value, least in (
                ("at_once", self.at_once, 1),
                ("ahead", self.ahead, 0),
                ("memory_mb", self.memory_mb, _LEAST_MB),
                ("file_mb", self.file_mb, 1),
                ("processes", self.processes, 4),
            )
            if not is_whole(value, least)
        ]
        if not self.tools or set(self.tools) - set(_TOLD) or len(set(self.tools)) < len(self.tools):
            faults.append(
                f"Sandbox(tools={self.tools!r}) names no tools that it has; give some of"
                f" {tuple(_TOLD)}"
            )
        if lost := [folder for folder in self.folders if not Path(folder).is_absolute()]:
            faults.append(
                f"Sandbox(folders=...) has {lost}, which stand for no one folder; give whole paths"
            )
        reason = missing()
        return [*faults, *([reason] if reason else [])]

    def definitions(self) -> Sequence[Message]:
        """Raises WorldFailed where this machine makes no sandbox: a trial runs in one."""
        if reason := fault():
            raise SandboxError(reason)
        return [_definition(name, *_TOLD[name]) for name in self.tools]

    async def open(self) -> SandboxSession:
        """A new one. Raises WorldFailed."""
        session = SandboxSession(self)
        await session.begin()
        return session


class SandboxSession:
    """The sandbox of one rollout. One that passes its limits is replaced, and the model is told."""

    def __init__(self, made_by: Sandbox) -> None:
        self._made_by, self._one = made_by, asyncio.Lock()
        """The lock: one command at a time, also where the conversations of a rollout go on beside
        each other."""
        self._sandbox: KeptSandbox | None = None

    @property
    def is_lost(self) -> bool:
        """Whether its sandbox has ended, by nothing that was asked of it."""
        return self._sandbox is not None and self._sandbox.has_ended

    async def begin(self) -> KeptSandbox:
        """Start it. Raises WorldFailed."""
        made_by = self._made_by
        limits = KeptLimits(
            memory_bytes=made_by.memory_mb << 20,
            file_bytes=made_by.file_mb << 20,
            processes=made_by.processes,
        )
        try:
            self._sandbox = KeptSandbox(limits, made_by.folders)
            await self._sandbox.ready()
        except SandboxError as error:
            self._end()
            raise WorldFailed(str(error)) from error
        except BaseException:
            self._end()
            raise
        return self._sandbox

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float, characters: int
    ) -> str:
        text = str(next(iter(arguments.values()), ""))

        async def run(sandbox: KeptSandbox) -> str:
            command = sandbox.python if name == "python" else sandbox.shell
            return _shown(await command(text, timeout_s=timeout_s, most_bytes=4 * characters))

        try:
            return await self._asked(run)
        except SandboxLost as error:
            return (
                f"error: {error}; the sandbox was started anew, and its files and variables are"
                " gone"
            )
        except CommandRefused as error:
            return f"error: {error}"

    async def write(self, path: str, data: bytes) -> None:
        """Put a file below /tmp. Raises WorldFailed; CommandRefused where it cannot be written."""
        await self._asked(lambda sandbox: sandbox.write(path, data))

    async def read(self, path: str) -> bytes:
        """A file below /tmp, 8 MiB at most. Raises WorldFailed; CommandRefused where it is not
        there, or longer.
        """
        return await self._asked(lambda sandbox: sandbox.read(path))

    async def close(self) -> None:
        """End it, with all that is in it."""
        self._end()

    async def _asked(self, ask: Callable[[KeptSandbox], Awaitable[T]]) -> T:
        """What the sandbox answers; one that is lost, or was left in the middle of a command, is
        ended.
        """
        async with self._one:
            try:
                return await ask(self._sandbox or await self.begin())
            except SandboxError as error:
                self._end()
                raise WorldFailed(str(error)) from error
            except BaseException as error:
                if not isinstance(error, CommandRefused) or isinstance(error, SandboxLost):
                    self._end()
                raise

    def _end(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.kill()


def _shown(result: CommandResult) -> str:
    text = result.output
    cut = result.total_bytes > len(text.encode("utf-8", "replace"))
    notes = [f"[cut: {result.total_bytes} bytes in all]"] if cut else []
    notes += [f"[{result.note}]"] if result.note else []
    joined = "\n".join([*([text.rstrip("\n")] if text.strip() else []), *notes])
    return joined or "[no output]"


def _definition(name: str, description: str, parameter: str, meaning: str) -> Message:
    properties = {parameter: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }
