"""Another rank of a reader: it takes its slices of the versions that the reader has verified, from
the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from transport.weights.errors import WeightError
from transport.weights.executors.shared_memory import SharedMemory
from transport.weights.layout.flat import FlatLayout
from transport.weights.layout.rank_slices import RankSlice
from transport.weights.memory.attached import Attached, Mapped
from transport.weights.memory.ports import Site


class RankReader:
    """Has no seat at the writer: its reader has one for all ranks, with one epoch, and tells it
    what to enter.

    A version is verified once, by the reader, in the memory that they all map; its gate, which the
    reader holds from then on and each of these from `enter` on, keeps it as it is. So ranks that
    enter what their reader has entered, and take it when all of them are inside, never hold
    different versions. For a single-threaded loop.

    Consumes: segments that the reader names. Produces: new values in the attached tensors.
    Waits for: nothing. Unblocked by: -
    """

    def __init__(
        self,
        address: str | Site,
        name: str,
        *,
        adopt: Literal["view", "copy"] = "view",
        threads: int = 1,
    ) -> None:
        """`address`, `adopt`, `threads`: as for the `WeightReader`; `name` is for errors."""
        self.name, self.version = name, -1
        self._port = (SharedMemory(address) if isinstance(address, str) else address).reader()
        self._attached = Attached(
            self._port, f"rank '{name}'", view=adopt == "view", threads=threads
        )
        self._layout: FlatLayout | None = None
        self._entered: tuple[Mapped, int] | None = None

    def attach(
        self, tensors: Mapping[str, torch.Tensor], slices: Mapping[str, RankSlice] | None = None
    ) -> None:
        """As `WeightReader.attach`; before the first `enter`."""
        self._attached.name(tensors, slices)

    def enter(self, segment: str, version: int, layout: Mapping[str, Any] | None = None) -> bool:
        """Step into the segment that holds this version; False when it is gone, or holds another by
        now.

        `layout`: the reader's, by `to_plain`, where it is another than before. LayoutMismatch when
        the attached tensors are not of it; WeightError before there is one.
        """
        self.decline()
        if layout is not None:
            self._layout = FlatLayout.from_plain(layout)
            self._attached.bind(self._layout)
        if self._layout is None or not self._attached.named:
            raise WeightError(
                f"rank '{self.name}' cannot enter version {version}; found"
                f" {'no layout' if self._attached.named else 'nothing attached'}; attach tensors,"
                " and pass the reader's layout with its first version"
            )
        mapped = self._attached.open(segment)
        if mapped is None or not mapped.segment.enter(version):
            return False
        self._entered = (mapped, version)
        return True

    def decline(self) -> None:
        """Step out without taking the version that was entered, if any."""
        if self._entered is not None:
            self._entered[0].segment.leave()
            self._entered = None

    def adopt(self) -> int:
        """Make the version that was entered the attached tensors' value; its number. WeightError
        outside of one.
        """
        if self._entered is None:
            raise WeightError(
                f"rank '{self.name}' cannot take a version; found none entered; enter what the"
                " reader has entered first"
            )
        (mapped, version), self._entered, self.version = self._entered, None, -1
        self._attached.take(mapped)
        self.version = version
        return version

    def let_go(self) -> bool:
        """Leave the segment in use: the attached tensors have no value until `adopt`, which fills
        all. False before the first version, as of `WeightReader`.

        The version may be entered again (`WeightReader.enter_again`), as any other.
        """
        self.decline()
        self._attached.let_go()
        return self.version >= 0

    def close(self) -> None:
        """Leave; the tensors keep the version held, in memory of their own."""
        self.decline()
        self._attached.close()
        self._port.close()
