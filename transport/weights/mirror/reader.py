"""A reader whose trainer is on another host, with neighbours that read the same: one of them is the
mirror of all.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from transport.weights.encoding import SCALE, Encoding
from transport.weights.errors import AddressTaken
from transport.weights.executors.shared_memory import SharedMemory
from transport.weights.layout.flat import FlatLayout
from transport.weights.layout.layout import Layout
from transport.weights.layout.rank_slices import RankSlice
from transport.weights.memory.ports import TurnsTo
from transport.weights.mirror.choice import MirrorView, choose
from transport.weights.mirror.mirror import Mirror
from transport.weights.mirror.receiver import MirrorReceiver
from transport.weights.mirror.writer import MirrorWriter
from transport.weights.protocol.messages import Offer
from transport.weights.reader import WeightReader

LOOK_S = 0.1
"""Between two looks at the note."""


@dataclass(frozen=True, kw_only=True)
class MirrorPlace:
    """Where the readers of one trainer on one host find each other."""

    line: str
    """An address that all of them know, at which nobody listens: it names the note, and the
    segments of all."""
    own: str
    """That of one reader, where it offers if it is the mirror."""
    folder: str
    """Where segments lie."""
    order: int
    """Of the reader, among those of its host."""

    def at(self, address: str) -> SharedMemory:
        """Of one that is the mirror."""
        return SharedMemory(address, folder=self.folder, family=self.line)

    @property
    def note(self) -> Path:
        """The file that says who is the mirror now."""
        return Path(f"{self.line.removeprefix('ipc://')}.mirror")


class MirroredReader(WeightReader):
    """Takes versions from the mirror of its host, which is one of its neighbours or itself
    (`choice`).

    Consumes: offers of the mirror; as the mirror, versions of the trainer. Produces: values in the
    attached tensors. Waits for: nothing, except in `wait`. Unblocked by: the mirror's next
    version.
    """

    def __init__(
        self,
        place: MirrorPlace,
        name: str,
        layout: Layout,
        receive: Callable[..., MirrorReceiver],
        **knobs: Any,
    ) -> None:
        """`layout`: of one rank that holds all that travels (`travelling`). `receive`: opens the
        end that takes versions from the trainer, of layout and MirrorWriter. Else as for the
        `WeightReader`.
        """
        super().__init__(place.at(place.own), name, **knobs)
        self._place, self._whole, self._receive = place, layout, receive
        self._follows, self._turned, self._look_at = place.own, self._clock(), float("-inf")
        self._mirror: Mirror | None = None
        self._ended: Mirror | None = None
        self._has_turned = False

    @property
    def leads(self) -> bool:
        """Whether it is the mirror."""
        return self._mirror is not None

    def poll(self) -> Offer | None:
        """As of any reader. What has gone wrong in its thread, if it is the mirror, is raised
        here.
        """
        if self._look_at == float("-inf"):
            self._turned = self._clock()
        offer = super().poll()
        if (now := self._clock()) >= self._look_at:
            self._look_at = now + LOOK_S
            self._look(now)
        return offer

    def close(self) -> None:
        """Leave; a neighbour is the mirror then."""
        if not self._closed and self._mirror is not None:
            if self._noted() == self._place.own:
                self._place.note.unlink(missing_ok=True)
            self._mirror.end()
        super().close()
        for mirror in (self._mirror, self._ended):
            if mirror is not None:
                mirror.close()

    def _look(self, now: float) -> None:
        if self._mirror is not None and self._mirror.error is not None:
            raise self._mirror.error
        noted = self._noted()
        quiet_s = now - max(self._membership.heard, self._turned)
        seen = MirrorView(
            own=self._place.own,
            follows=self._follows if self._has_turned else "",
            noted=noted,
            leads=self.leads,
            quiet_s=quiet_s,
            order=self._place.order,
        )
        match choose(seen):
            case "lead":
                self._lead(now)
            case "follow":
                if self._mirror is not None:
                    self._mirror.end()
                    self._mirror, self._ended = None, self._mirror
                self._turn_to(noted, now)

    def _lead(self, now: float) -> None:
        if self._ended is not None and self._ended.is_alive():
            return
        try:
            layout = replace(self._whole.flat(0), aliases=self._whole.aliases)
            writer = MirrorWriter(layout, self._place.at(self._place.own), clock=self._clock)
        except AddressTaken:
            return  # by the attempt before this one, which is about to end
        self._mirror = Mirror(writer, self._receive(self._whole, writer))
        self._mirror.start()
        _write(self._place.note, self._place.own)
        self._turn_to(self._place.own, now)

    def _turn_to(self, address: str, now: float) -> None:
        assert isinstance(self._port, TurnsTo), "a reader of shared memory"
        self._port.turn(address)
        self._follows, self._turned = address, now
        self._has_turned = True

    def _noted(self) -> str:
        try:
            return self._place.note.read_text()
        except OSError:
            return ""


def travelling(
    encoding: Encoding,
    tensors: Mapping[str, torch.Tensor],
    slices: Sequence[Mapping[str, RankSlice]],
) -> Layout:
    """Of one rank that holds all that a trainer sends for these tensors; `slices`: their parts of
    it, by rank.
    """
    flat, cut = FlatLayout.of(tensors), slices[0] if slices else {}
    full = {}
    for spec in flat.tensors:
        shape = tuple(int(size) for size in cut[spec.name][0]) if spec.name in cut else spec.shape
        full[spec.name] = (
            shape,
            spec.dtype if spec.name.endswith(SCALE) else encoding.travels_as(spec.dtype),
        )
    return Layout.whole(full, aliases=flat.aliases)


def _write(file: Path, text: str) -> None:
    draft = file.with_name(f"{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    draft.write_text(text)
    draft.replace(file)
