"""Who may connect: private ipc folders, loopback, and CURVE keys for everything else."""

import contextlib
import dataclasses
import ipaddress
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import zmq

from transport.errors import AddressError, TransportError

# Connections between hosts that carry nothing any more are replaced soon after the network is
# back.
#
# Left to itself, TCP doubles the time between its tries, so that a network that was cut for t
# seconds is felt for up to 2t. The kernel gives up a connection on which nothing was acknowledged
# for `DEAD_MS`; ZeroMQ then tries to make another, each time for `CONNECT_MS`. It is kernels that
# acknowledge: a process that is stopped, or busy, loses no connection. What was on its way is lost
# with a connection, and whoever speaks over it says it again.


HEARTBEAT_MS, SILENT_MS = 2_000, 10_000
"""Of ZeroMQ's own signs of life, which its thread gives while a worker computes for minutes:
without them a connection is given up and made again; TCP alone would wait for minutes after a
cut."""
DEAD_MS = 3_000
"""Without an acknowledgement for so long a connection is given up."""
CONNECT_MS = 500
"""For one try to make another; several round trips between hosts."""


def watch(socket: "zmq.Socket[Any]", address: str) -> None:
    """Have ZeroMQ notice that a connection is lost, of a socket that connects to an address, or
    listens there; before it does.
    """
    socket.set(zmq.IPV6, "[" in address)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    give_up_soon(socket, address)


def give_up_soon(socket: "zmq.Socket[Any]", address: str) -> None:
    """Of a socket that connects to an address, or listens there; before it does. Within a machine
    nothing is lost.
    """
    if address.startswith("tcp://"):
        socket.set(zmq.TCP_MAXRT, DEAD_MS)
        socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)


T = TypeVar("T")

_MAX_IPC_PATH_BYTES = 107
_DOMAIN = "run"
_KEY_BYTES = 40
_IN_ORDER = ("receiver_public", "receiver_secret", "sender_public", "sender_secret")
KEYS_BYTES = 4 * _KEY_BYTES
"""Of `RunKeys.to_bytes`."""
HANDSHAKE_MS = 5_000
"""For a peer to say who it is; then it is cut off, so that connections that say nothing do not pile
up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """What one side of a channel holds of the CURVE keys of a run (Z85 text, 40 bytes each)."""

    receiver_public: bytes
    """Public key of all receivers."""
    sender_public: bytes
    """Public key of all senders; receivers accept no other."""
    secret: bytes = field(repr=False)
    """Secret key of this side."""


def make_keys() -> tuple[Keys, Keys]:
    """New keys for a run: (for receivers, for senders)."""
    both = RunKeys.make()
    return both.receivers, both.senders


@dataclass(frozen=True, kw_only=True, slots=True)
class RunKeys:
    """Both key pairs of a run: each of its processes holds them, because it receives on some edges
    and sends on others.

    They travel only over the socket pair by which a process is started, and are written nowhere.
    """

    receivers: Keys
    """For whoever listens: receivers of edges, the scheduler."""
    senders: Keys
    """For whoever connects: senders, workers."""

    @classmethod
    def make(cls) -> "RunKeys":
        """New ones."""
        receiver_public, receiver_secret = zmq.curve_keypair()
        sender_public, sender_secret = zmq.curve_keypair()
        public = Keys(receiver_public=receiver_public, sender_public=sender_public, secret=b"")
        return cls(
            receivers=dataclasses.replace(public, secret=receiver_secret),
            senders=dataclasses.replace(public, secret=sender_secret),
        )

    @classmethod
    def from_plain(cls, plain: Mapping[str, bytes]) -> "RunKeys | None":
        """What `to_plain` gave; None for an empty map."""
        if not plain:
            return None
        publics = {
            "receiver_public": plain["receiver_public"],
            "sender_public": plain["sender_public"],
        }
        return cls(
            receivers=Keys(secret=plain["receiver_secret"], **publics),
            senders=Keys(secret=plain["sender_secret"], **publics),
        )

    def to_plain(self) -> dict[str, bytes]:
        """For the settings of a process that is started."""
        return {
            "receiver_public": self.receivers.receiver_public,
            "receiver_secret": self.receivers.secret,
            "sender_public": self.receivers.sender_public,
            "sender_secret": self.senders.secret,
        }

    @classmethod
    def from_bytes(cls, data: bytes) -> "RunKeys":
        """What `to_bytes` gave. Errors: ValueError for anything else."""
        if len(data) != KEYS_BYTES:
            raise ValueError(f"the keys of a run are {KEYS_BYTES} bytes, but there are {len(data)}")
        parts = [data[at : at + _KEY_BYTES] for at in range(0, KEYS_BYTES, _KEY_BYTES)]
        keys = cls.from_plain(dict(zip(_IN_ORDER, parts, strict=True)))
        assert keys is not None, "there are four"
        return keys

    def to_bytes(self) -> bytes:
        """For a pipe or a private file."""
        plain = self.to_plain()
        return b"".join(plain[name] for name in _IN_ORDER)


class Guard:
    """Lets in only peers that hold the senders' key: a context of its own, with ZeroMQ's
    authenticator in a thread.
    """

    def __init__(self, keys: Keys) -> None:
        from zmq.auth.thread import ThreadAuthenticator

        self._keys = keys
        self.context: zmq.Context[Any] = zmq.Context()
        """For the sockets that it protects."""
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.configure_curve_callback(domain=_DOMAIN, credentials_provider=self)
        self._authenticator.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a peer's public key is the senders' key (called by the authenticator)."""
        return key == self._keys.sender_public

    def protect(self, socket: "zmq.Socket[bytes]") -> None:
        """Make a socket of this context demand the key; before it is bound."""
        socket.curve_server = True
        socket.curve_publickey = self._keys.receiver_public
        socket.curve_secretkey = self._keys.secret
        socket.zap_domain = _DOMAIN.encode()

    def close(self) -> None:
        """Stop the authenticator, after all sockets were closed; waits at most for their linger."""
        self._authenticator.stop()
        self.context.term()


def present(socket: "zmq.Socket[bytes]", keys: Keys) -> None:
    """Make a socket show the senders' key, and speak only with whoever holds the receivers'; before
    it connects.
    """
    socket.curve_serverkey = keys.receiver_public
    socket.curve_publickey = keys.sender_public
    socket.curve_secretkey = keys.secret


def endpoint(host: str, port: str = "*") -> str:
    """The tcp address of a host, a name or a number; `*` takes a free port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def reachable(address: str) -> str:
    """Where this machine's processes find who listens at an address: one of all interfaces stands
    for loopback.
    """
    return address.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace(
        "tcp://[::]:", "tcp://[::1]:"
    )


def again_at(host: str, before: str, listen: Callable[[str], T]) -> T:
    """Listen at a tcp address of a host: at the one of `before` where that is this host's and free,
    else at any port.

    TransportError where no port can be had.
    """
    if before and endpoint(host, before.rpartition(":")[2]) == before:
        with contextlib.suppress(TransportError):
            return listen(before)
    return listen(endpoint(host))


def check_address(address: str, keys: Keys | None) -> None:
    """Raise AddressError for an address where others than this user's processes could come in."""
    scheme, separator, place = address.partition("://")
    if scheme == "ipc" and separator:
        _check_ipc(address, place)
    elif scheme == "tcp" and separator and ":" in place:
        host = place.rpartition(":")[0].strip("[]")
        if keys is None and not _is_loopback(host):
            raise AddressError(
                f"{address} is open to other machines, and there are no keys; got host '{host}'; "
                "bind to 127.0.0.1, or pass the CURVE keys of the run"
            )
    else:
        raise AddressError(
            f"an address has to be ipc://PATH or tcp://HOST:PORT; got '{address}'; "
            "use ipc within a machine and tcp between machines"
        )


def _check_ipc(address: str, path: str) -> None:
    if not path.startswith("/"):
        raise AddressError(
            f"an ipc address needs an absolute path; got '{address}'; use ipc:///FOLDER/NAME"
        )
    if len(os.fsencode(path)) > _MAX_IPC_PATH_BYTES:
        raise AddressError(
            f"an ipc path is too long for a socket; got {len(os.fsencode(path))} bytes in '{path}',"
            f" at most {_MAX_IPC_PATH_BYTES} fit; choose a shorter folder"
        )
    folder = Path(path).parent
    try:
        status = folder.stat()
    except OSError as error:
        raise AddressError(
            f"the folder of {address} cannot be used; {error.strerror}: {folder}; make it with mode"
            " 0700"
        ) from error
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077 or status.st_uid != os.getuid():
        raise AddressError(
            f"the folder of {address} is open to others; {folder} has mode {mode:04o} and owner "
            f"{status.st_uid}; use a folder of your own with mode 0700"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
