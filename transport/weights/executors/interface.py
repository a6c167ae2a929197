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
