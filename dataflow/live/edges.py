"""How a run's edges stand, in plain values: what crosses data edges, and what exchanges on weight
edges took.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dataflow.display import EdgeSnapshot
from dataflow.worker.kept_counts import ENDS, Crossed, EdgeSums, total

_STALENESS = tuple(
    f"{part}_{kind}"
    for part in ("staleness", "staleness_generating", "staleness_waiting")
    for kind in ("mean", "max")
)


def counted(state: Mapping[str, Any]) -> EdgeSums | None:
    """What has crossed each data edge, as the workers of a run under way say; None where they count
    nothing.
    """
    heartbeats = [worker["heartbeat"] for worker in state.get("workers", {}).values()]
    counts = [heartbeat["crossed"] for heartbeat in heartbeats if "crossed" in heartbeat]
    return total(counts) if counts else None


def data_edges(
    edges: Iterable[EdgeSnapshot], now: EdgeSums | None, before: EdgeSums | None, passed: float
) -> list[dict[str, Any]]:
    """Each with its depth and credit, rows and bytes that have crossed it, and how many in each of
    the seconds passed, as counted where it ends. before: how things stood when those began; None:
    not known.
    """
    return [
        {
            "from": edge.producer,
            "to": edge.consumer,
            "source": edge.source,
            "depth": edge.depth,
            "capacity": edge.capacity,
            **_crossed(edge.name, now, before, passed),
        }
        for edge in edges
    ]


def _crossed(
    name: str, now: EdgeSums | None, before: EdgeSums | None, passed: float
) -> dict[str, Any]:
    if now is None:
        return {"rows_s": None, "bytes_s": None, "crossed": None}
    none = {end: Crossed() for end in ENDS}
    ends = {end: list(counts) for end, counts in now.get(name, none).items()}
    grown = None
    if before is not None and passed > 0:
        was = before.get(name, none)["received"]
        grown = Crossed(
            *(after - earlier for after, earlier in zip(ends["received"], was, strict=True))
        )
    if grown is None or min(grown) < 0:
        return {"rows_s": None, "bytes_s": None, "crossed": ends}
    return {
        "rows_s": round(grown.rows / passed, 3),
        "bytes_s": round(grown.bytes / passed, 1),
        "crossed": ends,
    }


def data_edges_of(graph: Mapping[str, Any]) -> list[EdgeSnapshot]:
    """Those of a graph that nobody runs now."""
    return [
        EdgeSnapshot(
            producer=str(edge["from"]), consumer=str(edge["to"]), source=str(edge.get("source"))
        )
        for edge in graph.get("edges", [])
        if edge.get("plane") == "data"
    ]


def exchanges(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of a trainer's line of metrics, by reader, all its replicas together: the oldest version that
    one of them took last, and of what that cost them the most: seconds as the trainer and as the
    reader sees them, bytes, and what these would have been without deltas and quantization.
    """
    by_reader: dict[str, dict[str, Any]] = {}
    for name, exchange in _exchanges_of(line):
        version = exchange.get("version")
        version = max(0, version) if isinstance(version, int) else 0
        summary = by_reader.setdefault(
            name.rpartition("-")[0] or name, {"readers": 0, "version": version}
        )
        summary["readers"] += 1
        summary["version"] = min(summary["version"], version)
        for key in ("seconds", "committed_seconds", "taken_seconds", "nbytes", "full_bytes"):
            if isinstance(exchange.get(key), int | float):
                summary[key] = max(summary.get(key, 0), exchange[key])
    return by_reader


def _exchanges_of(line: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each reader of which the line tells."""
    sent = line.get("weights_sent")
    for name, exchange in sent.items() if isinstance(sent, dict) else ():
        if isinstance(exchange, dict):
            yield name, exchange


def newest_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows at the weight edges of a trainer, of its newest line."""
    figures = {key: line.get(key) for key in ("step", *_STALENESS, "seconds_publish")}
    return figures | {"exchanges": exchanges(line)}
