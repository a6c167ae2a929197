"""Where one writer and its readers meet: within a machine at a socket of the lock's owner, else at
an address with keys.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import secrets
import socket
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import xxhash
import zmq

from transport.errors import AddressError
from transport.security import Guard, RunKeys, present, watch
from transport.weights.errors import AddressTaken, WeightError
from transport.weights.protocol.messages import MESSAGE_BYTES

RELEASE_S = 1.0
"""How long ZeroMQ may take to let go of a port that was closed."""

Socket = zmq.Socket[bytes]


class LocalAddress:
    """An address of the form ipc:///folder/name.sock, or tcp://127.0.0.1:port.

    A lock on a file beside the socket, or in `folder`, makes one process its owner; the kernel lets
    a dead one's go.
    """

    def __init__(self, url: str, folder: str | Path | None = None) -> None:
        """`folder`: for files that belong to the address, /dev/shm where there is one; the same for
        all who use it.
        """
        self.url = checked(url)
        self.folder = memory_folder(folder)
        self.prefix = f"dataflow-{xxhash.xxh3_64_hexdigest(self.url.encode())}-"
        self._path = (
            Path(self.url.removeprefix("ipc://")) if self.url.startswith("ipc://") else None
        )
        self.lock_path = Path(f"{self._path or self.folder / self.prefix}.lock")
        """The file whose lock owns the address."""

    def claim(self) -> int:
        """Own the address, until `release` or the end of this process; the file that holds the
        lock.

        AddressTaken while another process owns it.
        """
        while True:
            lock = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not flock(lock, fcntl.LOCK_EX):
                owner = os.pread(lock, 32, 0).decode(errors="replace")
                os.close(lock)
                raise AddressTaken(
                    f"another writer has the address {self.url}; found process"
                    f" {owner or '(unknown)'} alive; stop it, or give this model an address of"
                    " its own"
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

    def release(self, lock: int) -> None:
        """Give it up; the socket must be closed."""
        if self._path:
            self._path.unlink(missing_ok=True)
        self.lock_path.unlink(missing_ok=True)
        os.close(lock)

    def bound(self) -> Socket:
        """The owner's socket. Raises AddressTaken, or AddressError where the address cannot be
        bound.
        """
        return _bound(zmq.Context.instance().socket(zmq.ROUTER), self.url)

    def connected(self) -> Socket:
        """A socket of anybody else, whether the owner is there yet or not."""
        return _connected(zmq.Context.instance().socket(zmq.DEALER), self.url)


class HostAddress:
    """An address of the form tcp://host:port, which other hosts reach: whoever has no key of the
    run is not heard.

    Whoever has bound it owns it, and no file belongs to it. Port `*` takes a free one.
    """

    def __init__(self, url: str, keys: RunKeys) -> None:
        """AddressError for another form."""
        if not url.startswith("tcp://") or ":" not in url.removeprefix("tcp://"):
            raise AddressError(
                f"hosts meet at an address tcp://HOST:PORT; found {url!r}; use ipc within a machine"
            )
        self.url, self._keys = url, keys
        self._guard: Guard | None = None

    def bound(self) -> Socket:
        """The owner's socket; `url` then holds its port. Raises AddressTaken, or AddressError where
        the address cannot be bound.
        """
        self._guard = Guard(self._keys.receivers)
        socket: Socket = self._guard.context.socket(zmq.ROUTER)
        watch(socket, self.url)
        self._guard.protect(socket)
        try:
            _bound(socket, self.url)
        except BaseException:
            self.release()
            raise
        endpoint = socket.last_endpoint
        assert isinstance(endpoint, bytes), "what ZeroMQ says of a bound socket"
        self.url = endpoint.decode()
        return socket

    def release(self) -> None:
        """Give it up; the socket must be closed."""
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def connected(self) -> Socket:
        """A socket of anybody else, whether the owner is there yet or not."""
        socket: Socket = zmq.Context.instance().socket(zmq.DEALER)
        watch(socket, self.url)
        present(socket, self._keys.senders)
        return _connected(socket, self.url)


def memory_folder(folder: str | Path | None = None) -> Path:
    """Where files are that lie in memory: `folder`, else /dev/shm where there is one."""
    shm = Path("/dev/shm")
    return Path(folder) if folder else shm if shm.is_dir() else Path(tempfile.gettempdir())


def checked(url: str) -> str:
    """The address with an absolute path. AddressError where others than this user could listen or
    speak.
    """
    parts = urlsplit(url)
    if parts.scheme == "tcp" and parts.hostname in ("127.0.0.1", "localhost", "::1") and parts.port:
        return url
    if parts.scheme != "ipc":
        raise AddressError(
            f"weights in shared memory stay on one machine; found address {url!r}; "
            "use ipc:///folder/name.sock or tcp://127.0.0.1:port"
        )
    path = Path(url.removeprefix("ipc://")).absolute()
    mode = path.parent.stat().st_mode & 0o777 if path.parent.is_dir() else None
    if mode is None or mode & 0o077:
        raise AddressError(
            f"the folder of {url} must be there and be closed to other users; found"
            f" {'no such folder' if mode is None else f'mode {mode:04o}'}; make it with mode 0700"
        )
    return f"ipc://{path}"


def arrived(socket: Socket) -> list[bytes] | None:
    """The frames of the next message, None when there is none. Never waits."""
    try:
        return socket.recv_multipart(flags=zmq.NOBLOCK)
    except zmq.Again:
        return None


def sent(socket: Socket, *frames: bytes) -> bool:
    """Hand over a message; False when the peer is known to be gone. A full pipe loses it, as a
    network might.
    """
    try:
        socket.send_multipart(frames, flags=zmq.NOBLOCK)
    except zmq.Again:
        return True
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True


def flock(file: int, how: int) -> bool:
    """Take a lock on an open file; False when others hold it. Never waits."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _bound(socket: Socket, url: str) -> Socket:
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.ROUTER_HANDOVER, 1)
    _bounded(socket)
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            socket.bind(url)
            return socket
        except zmq.ZMQError as error:
            in_use = error.errno == zmq.EADDRINUSE
            if in_use and time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            socket.close()
            raise (AddressTaken if in_use else AddressError)(
                f"the weight plane cannot listen at {url}; found: {error}; "
                "name another address (an ipc path has at most 107 characters)"
            ) from None


def _connected(socket: Socket, url: str) -> Socket:
    socket.set(zmq.IDENTITY, b"r" + secrets.token_bytes(15))
    socket.set(zmq.RECONNECT_IVL, 20)
    socket.set(zmq.RECONNECT_IVL_MAX, 200)
    _bounded(socket)
    socket.connect(url)
    return socket


def _bounded(socket: Socket) -> None:
    socket.set(zmq.MAXMSGSIZE, MESSAGE_BYTES)
    socket.set(zmq.LINGER, 200)


def interface_of(host: str) -> str:
    """Its name; the loopback's where `host`, an address or a name of this host, is empty.

    WeightError where no interface has it.
    """
    interfaces = psutil.net_if_addrs()
    host_addresses = _addresses(host) if host else {"127.0.0.1"}
    for name, addresses in interfaces.items():
        if host_addresses & {address.address.partition("%")[0] for address in addresses}:
            return str(name)
    # all of 127.0.0.0/8 is one interface's, which names one address
    for name, addresses in interfaces.items():
        own = {
            ipaddress.ip_address(address.address)
            for address in addresses
            if address.family == socket.AF_INET
        }
        if any(address.is_loopback for address in own) and any(
            ipaddress.ip_address(text).is_loopback for text in host_addresses
        ):
            return str(name)
    listed = sorted(
        address.address
        for addresses in interfaces.values()
        for address in addresses
        if address.family == socket.AF_INET
    )
    raise WeightError(
        f"no network interface of {socket.gethostname()} has the address {host}, by which others"
        f" are to find it; found {listed};"
        " give each host an address of its own interfaces"
    )


def _addresses(host: str) -> set[str]:
    try:
        return {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise WeightError(
            f"the address '{host}' of this host cannot be found; {error}; name it by a number"
        ) from None
