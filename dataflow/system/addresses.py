"""Which address of this machine other machines reach."""

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from dataflow.errors import GraphError, RunError


def own_address(wanted: str, towards: str) -> str:
    """An address of this machine. wanted: one, or the name of an interface that has it; empty: the
    one by which this machine reaches `towards`, a tcp address. Errors: RunError where there is
    none.
    """
    interfaces: Mapping[str, Sequence[Any]] = psutil.net_if_addrs()
    if wanted in interfaces:
        return _of(wanted, interfaces[wanted])
    return wanted or _route(towards)


def resolved(name: str, whose: str) -> str:
    """The address that a name stands for, as a socket is bound to no name. whose: of what it is
    said to be the address. Errors: GraphError where it stands for none.
    """
    try:
        return str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise GraphError(
            f"{whose} is '{name}', which is the address of no host ({error}); give one that all"
            " hosts reach"
        ) from error


def _of(name: str, addresses: Sequence[Any]) -> str:
    """An address that an interface has, of version 4 where there is one."""
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in addresses:
            if (
                address.family == family
                and not ipaddress.ip_address(address.address.partition("%")[0]).is_link_local
            ):
                return str(address.address)
    raise RunError(
        f"interface '{name}' has no address that others could reach; name another one, or an"
        " address"
    )


def _route(towards: str) -> str:
    """The address that packets to another one would leave from; none is sent."""
    host, _, port = towards.removeprefix("tcp://").rpartition(":")
    try:
        family, kind, _, _, socket_address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as trial:
            trial.connect(socket_address)
            return str(trial.getsockname()[0])
    except (OSError, ValueError) as error:
        raise RunError(
            f"this machine has no way to {towards} ({error}); see that the address of the scheduler"
            " is one that all hosts reach, and name it with --listen"
        ) from None
