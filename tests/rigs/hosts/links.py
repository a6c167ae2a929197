"""The links of hosts to their bridge, cut and mended packet by packet: nobody is told, as with a
switch that fails.
"""

import subprocess
from collections.abc import Sequence

SINK = "sink"
EVERYTHING = ("protocol", "all", "u32", "match", "u32", "0", "0")


def tool(enter: Sequence[str], *command: str, lines: Sequence[str] = ()) -> None:
    """`ip`, `tc` or `bridge` in namespaces; `lines`: a batch of commands. OSError tells what it
    found.
    """
    batch = "\n".join(lines) if lines else None
    done = subprocess.run(
        [*enter, *command], input=batch, capture_output=True, text=True, timeout=30
    )
    if done.returncode:
        raise OSError(f"{' '.join(command)} {'; '.join(lines)}: {done.stderr.strip()}")


def bridge(enter: Sequence[str]) -> None:
    """A switch without an address, and a place where packets end."""
    up = (
        "link add bridge type bridge",
        "link set bridge up",
        f"link add {SINK} type bridge",
        f"link set {SINK} up",
    )
    tool(enter, "ip", "-batch", "-", lines=up)


def plug(enter: Sequence[str], port: str, pid: int, hardware: str) -> None:
    """A cable from the bridge to the network namespace of `pid`, where it is called eth0."""
    lines = (
        f"link add {port} type veth peer name eth0 address {hardware} netns {pid}",
        f"link set {port} master bridge up",
    )
    tool(enter, "ip", "-batch", "-", lines=lines)
    tool(enter, "tc", "qdisc", "add", "dev", port, "clsact")


def unplug(enter: Sequence[str], port: str) -> None:
    tool(enter, "ip", "link", "delete", port)


def address(enter: Sequence[str], own: str) -> None:
    """On the host's side."""
    tool(
        enter,
        "ip",
        "-batch",
        "-",
        lines=("link set lo up", f"address add {own} dev eth0", "link set eth0 up"),
    )


def lose(enter: Sequence[str], port: str, hook: str, match: Sequence[str] = EVERYTHING) -> None:
    """Packets that match end in the sink. hook: `ingress` is what the host sends, `egress` what it
    receives.
    """
    away = ("action", "mirred", "egress", "redirect", "dev", SINK)
    tool(enter, "tc", "filter", "add", "dev", port, hook, *match, *away)


def of_peer(other: str, end: str) -> tuple[str, ...]:
    """Matches what has this address as its `src` or `dst`."""
    return ("protocol", "ip", "u32", "match", "ip", end, f"{other}/32")


def lose_none(enter: Sequence[str], port: str) -> None:
    for hook in ("ingress", "egress"):
        tool(enter, "tc", "filter", "del", "dev", port, hook)


def pace(enter: Sequence[str], device: str, mbit_per_s: float | None) -> None:
    """What leaves the device; None: as fast as it can."""
    if mbit_per_s is None:
        tool(enter, "tc", "qdisc", "del", "dev", device, "root")
    else:
        how = ("rate", f"{mbit_per_s}mbit", "burst", "128kb", "latency", "500ms")
        tool(enter, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *how)
