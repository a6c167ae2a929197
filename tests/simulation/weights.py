"""A site of the weight plane between simulated processes: segments with gates, and words that may
be lost.

`WeightWriter` and `WeightReader` run on it as they do on shared memory; a dead process holds no
gate shut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import zmq

from transport.weights.errors import AddressTaken
from transport.weights.protocol.messages import ReaderMessage, WriterMessage

from .network import Pipe, SimulatedNetwork
from .process import Process


class Segment:
    """A buffer in shared memory, and who is inside its gate."""

    def __init__(self, key: str, nbytes: int) -> None:
        self.key, self.version = key, -1
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8)
        self.inside: set[str] = set()
        self.sealed = True


class Site:
    """Where one trainer's writer and its readers meet, over all their incarnations."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.network = network
        self.segments: dict[str, Segment] = {}
        self.writer_port: WriterPort | None = None
        self.made = 0

    def of(self, process: Process) -> SiteOf:
        """The site as one incarnation of a process sees it."""
        return SiteOf(self, process)


class SiteOf:
    """`transport.weights.executors.Site` for one process."""

    def __init__(self, site: Site, process: Process) -> None:
        self._site, self._process = site, process

    def writer(self, poll: Callable[[], None]) -> WriterPort:
        """Claim it, and sweep what a killed writer left."""
        before = self._site.writer_port
        if before is not None and before.host == self._process.host:
            raise AddressTaken("this site has a writer; found a second one; close the first")
        if before is not None:  # it is on a host that was lost, and the readers are told
            before.leave()
        self._site.segments.clear()
        self._site.writer_port = WriterPort(self._site, self._process)
        return self._site.writer_port

    def reader(self) -> ReaderPort:
        """Connect to it, now or when a writer appears."""
        return ReaderPort(self._site, self._process)


class WriterPort:
    """The end of the writer."""

    socket: zmq.Socket[bytes] | None = None

    def __init__(self, site: Site, process: Process) -> None:
        self._site, self._process, self.host = site, process, process.host
        self.arrivals: deque[tuple[bytes, ReaderMessage]] = deque()
        self.peers: dict[bytes, Meeting] = {}
        process.on_death.append(self.close)

    def segment(self, nbytes: int) -> WriterSegment:
        """A new segment, sealed."""
        self._process.point()
        self._site.made += 1
        segment = self._site.segments[str(self._site.made)] = Segment(str(self._site.made), nbytes)
        return WriterSegment(self._site, segment, self._process)

    def receive(self) -> list[tuple[bytes, ReaderMessage]]:
        """All that has arrived."""
        arrived = list(self.arrivals)
        self.arrivals.clear()
        return arrived

    def send(self, peer: bytes, message: WriterMessage) -> bool:
        """Hand over a message; False where the peer is known to be gone."""
        self._process.point()
        meeting = self.peers.get(peer)
        if meeting is None or not meeting.back.whole:
            return False
        meeting.back.send(message)
        return True

    def arrive(self, message: tuple[bytes, ReaderMessage]) -> None:
        """A message is here."""
        self.arrivals.append(message)
        self._process.wake()

    def wait(self, timeout_s: float) -> None:
        """Time passes between events only."""

    def close(self) -> None:
        """Leave the address."""
        if self._site.writer_port is self:
            self._site.writer_port = None
        self.leave()

    def leave(self) -> None:
        """No reader speaks to it any more."""
        for meeting in self.peers.values():
            meeting.cut()


class WriterSegment:
    """A segment as the writer sees it."""

    progress: torch.Tensor | None = None

    def __init__(self, site: Site, segment: Segment, process: Process) -> None:
        self.key, self.buffer = segment.key, segment.buffer
        self._site, self._segment, self._process = site, segment, process

    def seal(self) -> bool:
        """Shut the gate if nobody is inside."""
        self._process.point()
        if self._segment.inside:
            return False
        self._segment.sealed, self._segment.version = True, -1
        return True

    def unseal(self, version: int) -> None:
        """Open it to those who look for this version."""
        self._process.point()
        self._segment.sealed, self._segment.version = False, version

    def retire(self) -> None:
        """Nobody can open it any more."""
        self._site.segments.pop(self.key, None)

    def close(self) -> None:
        """Nothing to give back."""


class Meeting:
    """A connection of one reader to one writer."""

    def __init__(
        self, network: SimulatedNetwork, reader: ReaderPort, writer: WriterPort, peer: bytes
    ) -> None:
        self.peer = peer
        self.forth = Pipe(
            network, lambda message: writer.arrive((peer, message)), reader.host, writer.host
        )
        self.back = Pipe(network, reader.arrive, writer.host, reader.host)

    def cut(self) -> None:
        """It breaks."""
        self.forth.cut()
        self.back.cut()


class ReaderPort:
    """The end of a reader."""

    socket: zmq.Socket[bytes] | None = None

    def __init__(self, site: Site, process: Process) -> None:
        self._site, self._process, self.host = site, process, process.host
        self._arrivals: deque[WriterMessage] = deque()
        self._meeting: Meeting | None = None
        process.on_death.append(self.close)

    def segment(self, key: str, nbytes: int) -> ReaderSegment | None:
        """Open a segment that is still there."""
        self._process.point()
        segment = self._site.segments.get(key)
        return None if segment is None else ReaderSegment(segment, self._process)

    def receive(self) -> list[WriterMessage]:
        """All that has arrived."""
        arrived = list(self._arrivals)
        self._arrivals.clear()
        return arrived

    def send(self, message: ReaderMessage) -> None:
        """Hand over a message; lost where nobody listens."""
        self._process.point()
        writer = self._site.writer_port
        if writer is not None and (self._meeting is None or not self._meeting.forth.whole):
            self._site.made += 1
            peer = self._site.made.to_bytes(8, "little")
            self._meeting = writer.peers[peer] = Meeting(self._site.network, self, writer, peer)
        if self._meeting is not None:
            self._meeting.forth.send(message)

    def arrive(self, message: WriterMessage) -> None:
        """A message is here."""
        self._arrivals.append(message)
        self._process.wake()

    def wait(self, timeout_s: float) -> None:
        """Time passes between events only."""

    def close(self) -> None:
        """Disconnect."""
        if self._meeting is not None:
            self._meeting.cut()


class ReaderSegment:
    """A segment as one reader sees it; its lock goes with the process."""

    progress: torch.Tensor | None = None

    def __init__(self, segment: Segment, process: Process) -> None:
        self.buffer = segment.buffer
        self._segment, self._process = segment, process
        self._holder = f"{process.name}:{process.attempt}"
        process.on_death.append(self.leave)

    def enter(self, version: int) -> bool:
        """Step inside."""
        self._process.point()
        if self._segment.sealed or self._segment.version != version:
            return False
        self._segment.inside.add(self._holder)
        return True

    def leave(self) -> None:
        """Step out."""
        self._segment.inside.discard(self._holder)

    def close(self) -> None:
        """Closing a file gives back its lock."""
        self.leave()
