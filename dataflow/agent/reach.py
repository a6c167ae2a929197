"""Whether hosts reach each other at the addresses that they say: each listens there, and connects
to all others.
"""

import errno
import os
import selectors
import socket
import time
from collections.abc import Mapping

from dataflow.errors import RunError

PROBE_S = 5.0
"""For all others to be reached."""
_QUEUE = 4096
"""Hosts that probe at once."""
_AT_ONCE = 128
"""Probes under way; a process has few files open by default."""
_UNDER_WAY = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)


class ReachPort:
    """A port at a host's address behind which is nothing. Whoever connects has reached the host."""

    def __init__(self, address: str) -> None:
        """Errors: RunError where this host cannot listen there."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._socket = socket.create_server((address, 0), family=family, backlog=_QUEUE)
        except OSError as error:
            raise RunError(
                f"this host is to be reached at {address}, but cannot listen there:"
                f" {error.strerror or error}; name an address or an interface of this host"
                " (DATAFLOW_AGENT_ADDRESS)"
            ) from None
        self._socket.setblocking(False)
        self.address = f"{address}|{self._socket.getsockname()[1]}"
        """For those who probe."""

    def answer(self) -> None:
        """Let go of those who have probed."""
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return

    def close(self) -> None:
        """Nobody is to probe any more."""
        self._socket.close()


def unreached(addresses: Mapping[str, str], within_s: float = PROBE_S) -> dict[str, str]:
    """Of these hosts, by name, those that this one does not reach, and why. addresses: of each."""
    deadline = time.monotonic() + within_s
    waiting, errors = sorted(addresses.items()), {}
    with selectors.DefaultSelector() as selector:
        while waiting or selector.get_map():
            while waiting and len(selector.get_map()) < _AT_ONCE:
                name, address = waiting.pop()
                probe, number = _probe(address)
                if number in _UNDER_WAY:
                    selector.register(probe, selectors.EVENT_WRITE, (name, address))
                else:
                    probe.close()
                    errors[name] = _why(address, number)
            left_s = deadline - time.monotonic()
            for key, _ in selector.select(max(0.0, left_s)):
                _end(selector, key, errors)
            if left_s <= 0:
                for key in list(selector.get_map().values()):
                    _end(selector, key, errors, errno.ETIMEDOUT)
                errors.update((name, _why(address, errno.ETIMEDOUT)) for name, address in waiting)
                return errors
    return errors


def _probe(address: str) -> tuple[socket.socket, int]:
    address, _, port = address.rpartition("|")
    probe = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    probe.setblocking(False)
    return probe, probe.connect_ex((address, int(port)))


def _end(
    selector: selectors.BaseSelector,
    key: selectors.SelectorKey,
    found: dict[str, str],
    number: int = 0,
) -> None:
    """Of one probe. number: how it ended, where the kernel does not say."""
    name, address = key.data
    probe = key.fileobj
    assert isinstance(probe, socket.socket), "it was registered"
    selector.unregister(probe)
    number = number or probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    probe.close()
    if number:
        found[name] = _why(address, number)


def _why(address: str, number: int) -> str:
    return f"{address.rpartition('|')[0]} ({os.strerror(number)})"


def check_reach(host: str, addresses: Mapping[str, str]) -> None:
    """Refuse a run of which this host does not reach others. Errors: RunError that names them."""
    missed = unreached(
        {name: address for name, address in addresses.items() if name != host and address}
    )
    if missed:
        where = ", ".join(f"'{name}' at {why}" for name, why in sorted(missed.items()))
        raise RunError(
            f"host '{host}' does not reach host{'s' if len(missed) > 1 else ''} {where}; each host"
            " needs an address that all others reach: name its interface or address"
            " (DATAFLOW_AGENT_ADDRESS), and let all ports between the hosts be open"
        )
