"""The weight plane between processes of one machine: files in shared memory, file locks, ZeroMQ for
messages.

A segment is a file of its own, mapped by the writer and by its readers. Its gate is a lock (flock)
on it: shared while a reader is inside, exclusive while the writer writes. The kernel lets go of a
dead process's locks, so a killed reader holds nothing up; a frozen one keeps its lock, and its file
is left to it. A lock on a file beside the socket makes one writer the owner of an address, and lets
the next one sweep what a killed one left. (A process forked from a reader shares its locks; fork
before connecting.)

Readers verify a version while it is written: without the lock, below the watermark in the segment's
first page. What they adopt, they have entered, and it is the version that they have read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from transport.errors import MessageError
from transport.weights.errors import SegmentError
from transport.weights.executors import ReaderSegment, WriterSegment
from transport.weights.executors.address import LocalAddress, Socket, arrived, flock, sent
from transport.weights.protocol.messages import CODEC, Message, ReaderMessage, WriterMessage

HEADER_BYTES = mmap.PAGESIZE
"""Before the tensors: eight bytes of magic; the version that the segment holds; the one that is
written, and the bytes of it that are whole; all int64."""
MAGIC = b"DFWEIGHT"


class SharedMemory:
    """An address of the form ipc:///folder/name.sock, or tcp://127.0.0.1:port."""

    def __init__(self, address: str, *, folder: str | Path | None = None) -> None:
        """`folder`: where the segments lie, /dev/shm where there is one; the same for writer and
        readers.
        """
        self.place = LocalAddress(address, folder)

    @property
    def address(self) -> str:
        """Where writer and readers meet."""
        return self.place.url

    def writer(self, poll: Callable[[], None]) -> FileWriterPort:
        """Claim the address, and sweep the segments that a killed writer left there."""
        return FileWriterPort(self.place, *self._claimed())

    def reader(self) -> FileReaderPort:
        """Connect to the address."""
        return FileReaderPort(self.place)

    def _claimed(self) -> tuple[Socket, int]:
        """The writer's socket, and the file whose lock it holds."""
        lock = self.place.claim()
        try:
            self._unlink_segments()
            return self.place.bound(), lock
        except BaseException:
            self.place.release(lock)
            raise

    def _unlink_segments(self) -> None:
        """Those that a killed writer of this address left."""
        place = self.place
        for path in place.folder.glob(f"{place.prefix}*"):
            if path != place.lock_path:
                path.unlink(missing_ok=True)


class _WriterSegment:
    def __init__(self, folder: Path, key: str, nbytes: int) -> None:
        self.key = key
        self._path = folder / key
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(self._file, struct.pack("<8sqqq", MAGIC, -1, -1, 0), 0)
            allocate(self._file, HEADER_BYTES + nbytes)
            mapping = mmap.mmap(self._file, HEADER_BYTES + nbytes)
        except OSError as error:
            self.retire()
            self.close()
            free = os.statvfs(folder)
            raise SegmentError(
                f"no shared memory for a version of {nbytes >> 20} MiB; found {error.strerror}, "
                f"{free.f_bavail * free.f_frsize >> 20} MiB free in {folder}; enlarge it (docker: "
                "--shm-size) or choose another folder"
            ) from None
        self.buffer = torch.frombuffer(mapping, dtype=torch.uint8, offset=HEADER_BYTES)
        self.progress: torch.Tensor | None = _progress(mapping)
        flock(self._file, fcntl.LOCK_EX)

    def seal(self) -> bool:
        if not flock(self._file, fcntl.LOCK_EX):
            return False
        os.pwrite(self._file, struct.pack("<qqq", -1, -1, 0), len(MAGIC))
        return True

    def unseal(self, version: int) -> None:
        os.pwrite(
            self._file, struct.pack("<qqq", version, version, self.buffer.numel()), len(MAGIC)
        )
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def retire(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self.buffer, self.progress = torch.empty(0, dtype=torch.uint8), None
        os.close(self._file)


class _ReaderSegment:
    def __init__(self, file: int, nbytes: int) -> None:
        self._file = file
        # A private mapping: a reader that writes to its parameters spoils its own pages, never the
        # others'.
        mapping = mmap.mmap(file, HEADER_BYTES + nbytes, flags=mmap.MAP_PRIVATE)
        self.buffer = torch.frombuffer(mapping, dtype=torch.uint8, offset=HEADER_BYTES)
        self.progress: torch.Tensor | None = _progress(
            mmap.mmap(file, HEADER_BYTES, prot=mmap.PROT_READ)
        )

    def enter(self, version: int) -> bool:
        if not flock(self._file, fcntl.LOCK_SH):
            return False
        if os.pread(self._file, 16, 0) == struct.pack("<8sq", MAGIC, version):
            return True
        self.leave()
        return False

    def leave(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self.buffer, self.progress = torch.empty(0, dtype=torch.uint8), None
        os.close(self._file)


class _FilePort:
    """One end's socket. Of malformed messages it warns once: junk changes nothing, fills no log."""

    def __init__(self, place: LocalAddress, socket: Socket) -> None:
        self.socket: Socket | None = socket
        self._place, self._socket = place, socket
        self._warned = False

    def wait(self, timeout_s: float) -> None:
        self._socket.poll(max(1, int(timeout_s * 1000)))

    def close(self) -> None:
        self._socket.close()

    def _heard(self) -> list[tuple[bytes, Message]]:
        """All messages that have arrived, each with its first frame: at a writer, the sender."""
        messages: list[tuple[bytes, Message]] = []
        while frames := arrived(self._socket):
            try:
                messages.append((frames[0], CODEC.decode(frames[-1])))
            except MessageError as error:
                if not self._warned:
                    warnings.warn(str(error), RuntimeWarning, stacklevel=2)
                self._warned = True
        return messages


class FileWriterPort(_FilePort):
    """A writer's end (`WriterPort`)."""

    def __init__(self, place: LocalAddress, socket: Socket, lock: int) -> None:
        super().__init__(place, socket)
        self._lock = lock

    def segment(self, nbytes: int) -> WriterSegment:
        """See `WriterPort`, as for all of these."""
        return _WriterSegment(self._place.folder, self._place.prefix + secrets.token_hex(6), nbytes)

    def receive(self) -> list[tuple[bytes, ReaderMessage]]:
        return [
            (peer, message) for peer, message in self._heard() if isinstance(message, ReaderMessage)
        ]

    def send(self, peer: bytes, message: WriterMessage) -> bool:
        return sent(self._socket, peer, CODEC.encode(message))

    def close(self) -> None:
        super().close()
        self._place.release(self._lock)


class FileReaderPort(_FilePort):
    """A reader's end (`ReaderPort`)."""

    def __init__(self, place: LocalAddress) -> None:
        super().__init__(place, place.connected())

    def segment(self, key: str, nbytes: int) -> ReaderSegment | None:
        if not key.startswith(self._place.prefix) or "/" in key:
            return None
        try:
            file = os.open(self._place.folder / key, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if os.fstat(file).st_size != HEADER_BYTES + nbytes:
            os.close(file)
            return None
        return _ReaderSegment(file, nbytes)

    def receive(self) -> list[WriterMessage]:
        return [message for _, message in self._heard() if isinstance(message, WriterMessage)]

    def send(self, message: ReaderMessage) -> None:
        sent(self._socket, CODEC.encode(message))


def _progress(mapping: mmap.mmap) -> torch.Tensor:
    with warnings.catch_warnings():
        # a reader's is not writable, and is not written to
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(mapping, dtype=torch.int64, count=2, offset=2 * len(MAGIC))


def allocate(file: int, nbytes: int) -> None:
    """Take the pages now, so that a full /dev/shm is an error here and no SIGBUS while writing."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, nbytes)
    else:
        os.ftruncate(file, nbytes)
