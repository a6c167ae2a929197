"""The network interface of this host that has an address."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from transport.weights.errors import WeightError


def interface_of(host: str) -> str:
    """Its name; the loopback's where `host`, an address or a name of this host, is empty.

    WeightError where no interface has it.
    """
    found = psutil.net_if_addrs()
    wanted = _addresses(host) if host else {"127.0.0.1"}
    for name, addresses in found.items():
        if wanted & {address.address.partition("%")[0] for address in addresses}:
            return str(name)
    # all of 127.0.0.0/8 is one interface's, which names one address
    for name, addresses in found.items():
        own = {
            ipaddress.ip_address(each.address)
            for each in addresses
            if each.family == socket.AF_INET
        }
        if any(each.is_loopback for each in own) and any(
            ipaddress.ip_address(each).is_loopback for each in wanted
        ):
            return str(name)
    addresses = [each for own in found.values() for each in own if each.family == socket.AF_INET]
    raise WeightError(
        f"no network interface of {socket.gethostname()} has the address {host}, by which others"
        f" are to find it; found {sorted(each.address for each in addresses)};"
        " give each host an address of its own interfaces"
    )


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise WeightError(
            f"the address '{host}' of this host cannot be found; {error}; name it by a number"
        ) from None
