"""Who may connect: private ipc folders, loopback, and CURVE keys for everything else."""

import ipaddress
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from transport.errors import AddressError

_MAX_IPC_PATH_BYTES = 107


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
    receiver_public, receiver_secret = zmq.curve_keypair()
    sender_public, sender_secret = zmq.curve_keypair()
    return (
        Keys(receiver_public=receiver_public, sender_public=sender_public, secret=receiver_secret),
        Keys(receiver_public=receiver_public, sender_public=sender_public, secret=sender_secret),
    )


def check_address(address: str, keys: Keys | None) -> None:
    """Raise AddressError for an address where others than this user's processes could come in."""
    scheme, separator, rest = address.partition("://")
    if scheme == "ipc" and separator:
        _check_ipc(address, rest)
    elif scheme == "tcp" and separator and ":" in rest:
        host = rest.rpartition(":")[0].strip("[]")
        if keys is None and not _is_loopback(host):
            raise AddressError(
                f"{address} is open to other machines, and there are no keys; got host '{host}'; "
                f"bind to 127.0.0.1, or pass the CURVE keys of the run"
            )
    else:
        raise AddressError(
            f"an address has to be ipc://PATH or tcp://HOST:PORT; got '{address}'; "
            f"use ipc within a machine and tcp between machines"
        )


def _check_ipc(address: str, path: str) -> None:
    if not path.startswith("/"):
        raise AddressError(f"an ipc address needs an absolute path; got '{address}'; use ipc:///FOLDER/NAME")
    if len(os.fsencode(path)) > _MAX_IPC_PATH_BYTES:
        raise AddressError(
            f"an ipc path is too long for a socket; got {len(os.fsencode(path))} bytes in '{path}', at most "
            f"{_MAX_IPC_PATH_BYTES} fit; choose a shorter folder"
        )
    folder = Path(path).parent
    try:
        found = folder.stat()
    except OSError as error:
        raise AddressError(
            f"the folder of {address} cannot be used; {error.strerror}: {folder}; make it with mode 0700"
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077 or found.st_uid != os.getuid():
        raise AddressError(
            f"the folder of {address} is open to others; {folder} has mode {mode:04o} and owner "
            f"{found.st_uid}; use a folder of your own with mode 0700"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
