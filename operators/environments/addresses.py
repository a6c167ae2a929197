"""Addresses of servers of environments: what cannot be one, and whether anybody is there when a run
begins."""

from __future__ import annotations

import socket
import urllib.request
from urllib.parse import SplitResult, urlsplit

_PORTS = {"ws": 80, "http": 80, "wss": 443, "https": 443}
_LOOK_S = 5.0


def address_fault(name: str, url: str, schemes: tuple[str, ...]) -> str | None:
    """What is wrong where the address of an environment's server cannot be one; None where it can.

    >>> address_fault("openenv:h:80", "h:80", ("ws",))
    "environment 'openenv:h:80' is asked at an address, but got 'h:80'; write one of ws://HOST:PORT"
    >>> address_fault("openenv:ws://h", "ws://h", ("ws",)) is None
    True
    """
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if is_one:
        return None
    return (
        f"environment '{name}' is asked at an address, but got {url!r}; write one of "
        f"{', '.join(f'{scheme}://HOST:PORT' for scheme in schemes)}"
    )


def absence(name: str, url: str) -> str | None:
    """What is wrong where nobody is at the address of an environment's server, as far as this
    machine can tell; None where somebody is, answers slowly, or is reached through a proxy."""
    parts = urlsplit(url)
    if _has_proxy(parts):
        return None
    host, port = str(parts.hostname), parts.port or _PORTS[parts.scheme]
    try:
        with socket.create_connection((host, port), timeout=_LOOK_S):
            return None
    except TimeoutError:
        return None
    except socket.gaierror as error:
        found, do = f"no machine by the name {host!r} ({error.strerror})", "correct the address"
    except OSError as error:
        found = f"nobody at {host!r}, port {port} ({error.strerror})"
        do = "start it before the run, or correct the address"
    return f"the server of environment '{name}' is not there; found {found}; {do}"


def _has_proxy(parts: SplitResult) -> bool:
    """Whether a client would ask a proxy of its environment instead."""
    return bool(urllib.request.getproxies()) and not urllib.request.proxy_bypass(
        str(parts.hostname)
    )
