"""The weight plane between processes of one machine: files in shared memory, file locks, ZeroMQ for words.

A segment is a file of its own, mapped by the writer and by its readers. Its gate is a lock (flock) on it:
shared while a reader is inside, exclusive while the writer writes. The kernel lets go of a dead process's
locks, so a killed reader holds nothing up; a frozen one keeps its lock, and its file is left to it. A lock on
a file beside the socket makes one writer the owner of an address, and lets the next one sweep what a killed
one left. (A process forked from a reader shares its locks; fork before connecting.)

Readers prove a version while it is written: without the lock, below the watermark in the segment's first page.
What they adopt, they have entered, and it is the version that they have read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import torch
import xxhash
import zmq

from transport.errors import AddressError
from transport.weights.errors import AddressTaken, MessageError, SegmentError
from transport.weights.messages import ReaderMessage, WriterMessage, decode, encode

HEADER_BYTES = mmap.PAGESIZE
"""Before the tensors: eight bytes of magic; the version that the segment holds; the one that is written, and the bytes
of it that are whole; all int64."""
MAGIC = b"DFWEIGHT"
MESSAGE_BYTES = 64 << 20
"""The largest message taken; a layout of 100,000 tensors is about 10 MB."""
RELEASE_S = 1.0
"""How long ZeroMQ may take to let go of a port that was closed."""


class SharedMemory:
    """An address of the form ipc:///folder/name.sock, or tcp://127.0.0.1:port."""

    def __init__(self, address: str, *, folder: str | Path | None = None) -> None:
        """`folder`: where the segments lie, /dev/shm where there is one; the same for writer and readers."""
        self.address = _checked(address)
        shm = Path("/dev/shm")
        self.folder = Path(folder) if folder else shm if shm.is_dir() else Path(tempfile.gettempdir())
        self.prefix = f"dataflow-{xxhash.xxh3_64_hexdigest(self.address.encode())}-"

    def writer(self, poll: Callable[[], None]) -> _WriterPort:
        """Claim the address, and sweep the segments that a killed writer left there."""
        lock = self._lock()
        try:
            self._unlink_segments()
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
            socket.set(zmq.ROUTER_MANDATORY, 1)
            socket.set(zmq.ROUTER_HANDOVER, 1)
            _bounded(socket)
            self._bind(socket)
        except BaseException:
            self._unlock(lock)
            raise
        return _WriterPort(self, socket, lock)

    def reader(self) -> _ReaderPort:
        """Connect to the address."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.set(zmq.IDENTITY, b"r" + secrets.token_bytes(15))
        socket.set(zmq.RECONNECT_IVL, 20)
        socket.set(zmq.RECONNECT_IVL_MAX, 500)
        _bounded(socket)
        socket.connect(self.address)
        return _ReaderPort(self, socket)

    def sweep(self) -> int:
        """Unlink what a killed writer of this address left in shared memory; the number of segments.

        AddressTaken while its writer is alive."""
        lock = self._lock()
        try:
            return self._unlink_segments()
        finally:
            self._unlock(lock)

    @property
    def lock_path(self) -> Path:
        """The file whose lock owns the address."""
        return Path(f"{self._socket_path or self.folder / self.prefix}.lock")

    @property
    def _socket_path(self) -> Path | None:
        return Path(self.address.removeprefix("ipc://")) if self.address.startswith("ipc://") else None

    def _bind(self, socket: zmq.Socket[bytes]) -> None:
        deadline = time.monotonic() + RELEASE_S
        while True:
            try:
                socket.bind(self.address)
                return
            except zmq.ZMQError as error:
                taken = error.errno == zmq.EADDRINUSE
                if taken and time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                socket.close()
                raise (AddressTaken if taken else AddressError)(
                    f"the weight plane cannot listen at {self.address}; found: {error}; "
                    "name another address (an ipc path has at most 107 characters)"
                ) from None

    def _lock(self) -> int:
        while True:
            lock = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not _flock(lock, fcntl.LOCK_EX):
                owner = os.pread(lock, 32, 0).decode(errors="replace")
                os.close(lock)
                raise AddressTaken(
                    f"another writer has the address {self.address}; found process {owner or '(unknown)'} "
                    "alive; stop it, or give this model an address of its own"
                )
            try:
                current = self.lock_path.stat().st_ino == os.fstat(lock).st_ino
            except FileNotFoundError:
                current = False
            if current:
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return lock
            os.close(lock)

    def _unlock(self, lock: int) -> None:
        self.lock_path.unlink(missing_ok=True)
        os.close(lock)

    def _unlink_segments(self) -> int:
        stale = [path for path in self.folder.glob(f"{self.prefix}*") if path != self.lock_path]
        for path in stale:
            path.unlink(missing_ok=True)
        return len(stale)


class _WriterSegment:
    def __init__(self, folder: Path, key: str, nbytes: int) -> None:
        self.key = key
        self._path = folder / key
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(self._file, struct.pack("<8sqqq", MAGIC, -1, -1, 0), 0)
            _allocate(self._file, HEADER_BYTES + nbytes)
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
        _flock(self._file, fcntl.LOCK_EX)

    def seal(self) -> bool:
        if not _flock(self._file, fcntl.LOCK_EX):
            return False
        os.pwrite(self._file, struct.pack("<qqq", -1, -1, 0), len(MAGIC))
        return True

    def unseal(self, version: int) -> None:
        os.pwrite(self._file, struct.pack("<qqq", version, version, self.buffer.numel()), len(MAGIC))
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def retire(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self.buffer, self.progress = torch.empty(0, dtype=torch.uint8), None
        os.close(self._file)


class _ReaderSegment:
    def __init__(self, file: int, nbytes: int) -> None:
        self._file = file
        # A private mapping: a reader that writes to its parameters spoils its own pages, never the others'.
        mapping = mmap.mmap(file, HEADER_BYTES + nbytes, flags=mmap.MAP_PRIVATE)
        self.buffer = torch.frombuffer(mapping, dtype=torch.uint8, offset=HEADER_BYTES)
        self.progress: torch.Tensor | None = _progress(mmap.mmap(file, HEADER_BYTES, prot=mmap.PROT_READ))

    def enter(self, version: int) -> bool:
        if not _flock(self._file, fcntl.LOCK_SH):
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


class _WriterPort:
    def __init__(self, site: SharedMemory, socket: zmq.Socket[bytes], lock: int) -> None:
        self.socket: zmq.Socket[bytes] | None = socket
        self._site, self._socket, self._lock = site, socket, lock

    def segment(self, nbytes: int) -> _WriterSegment:
        return _WriterSegment(self._site.folder, self._site.prefix + secrets.token_hex(6), nbytes)

    def receive(self) -> list[tuple[bytes, ReaderMessage]]:
        arrived: list[tuple[bytes, ReaderMessage]] = []
        while frames := _next(self._socket):
            try:
                message = decode(frames[-1])
            except MessageError as error:
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)
                continue
            if isinstance(message, ReaderMessage):
                arrived.append((frames[0], message))
        return arrived

    def send(self, peer: bytes, message: WriterMessage) -> bool:
        try:
            self._socket.send_multipart([peer, encode(message)], flags=zmq.NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def wait(self, timeout_s: float) -> None:
        self._socket.poll(max(1, int(timeout_s * 1000)))

    def close(self) -> None:
        self._socket.close()
        if path := self._site._socket_path:
            path.unlink(missing_ok=True)
        self._site._unlock(self._lock)


class _ReaderPort:
    def __init__(self, site: SharedMemory, socket: zmq.Socket[bytes]) -> None:
        self.socket: zmq.Socket[bytes] | None = socket
        self._site, self._socket = site, socket

    def segment(self, key: str, nbytes: int) -> _ReaderSegment | None:
        if not key.startswith(self._site.prefix) or "/" in key:
            return None
        try:
            file = os.open(self._site.folder / key, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if os.fstat(file).st_size != HEADER_BYTES + nbytes:
            os.close(file)
            return None
        return _ReaderSegment(file, nbytes)

    def receive(self) -> list[WriterMessage]:
        arrived: list[WriterMessage] = []
        while frames := _next(self._socket):
            message = decode(frames[-1])
            if isinstance(message, WriterMessage):
                arrived.append(message)
        return arrived

    def send(self, message: ReaderMessage) -> None:
        try:
            self._socket.send(encode(message), flags=zmq.NOBLOCK)
        except zmq.Again:
            return

    def wait(self, timeout_s: float) -> None:
        self._socket.poll(max(1, int(timeout_s * 1000)))

    def close(self) -> None:
        self._socket.close()


def _checked(address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme == "tcp" and parts.hostname in ("127.0.0.1", "localhost", "::1") and parts.port:
        return address
    if parts.scheme != "ipc":
        raise AddressError(
            f"weights in shared memory stay on one machine; found address {address!r}; "
            "use ipc:///folder/name.sock or tcp://127.0.0.1:port"
        )
    path = Path(address.removeprefix("ipc://")).absolute()
    mode = path.parent.stat().st_mode & 0o777 if path.parent.is_dir() else None
    if mode is None or mode & 0o077:
        raise AddressError(
            f"the folder of {address} must be there and be closed to other users; "
            f"found {'no such folder' if mode is None else f'mode {mode:04o}'}; make it with mode 0700"
        )
    return f"ipc://{path}"


def _bounded(socket: zmq.Socket[bytes]) -> None:
    socket.set(zmq.MAXMSGSIZE, MESSAGE_BYTES)
    socket.set(zmq.LINGER, 200)


def _next(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(flags=zmq.NOBLOCK)
    except zmq.Again:
        return None


def _flock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _progress(mapping: mmap.mmap) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a reader's is not writable, and is not written to
        return torch.frombuffer(mapping, dtype=torch.int64, count=2, offset=2 * len(MAGIC))


def _allocate(file: int, nbytes: int) -> None:
    """Take the pages now, so that a full /dev/shm is an error here and no SIGBUS while writing."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, nbytes)
    else:
        os.ftruncate(file, nbytes)
