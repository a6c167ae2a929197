"""Measured seconds of a device's kernels, read from the installed package: interpolated between the
shapes measured.
"""

from __future__ import annotations

import bisect
import importlib.metadata
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pyarrow.parquet as parquet

from dataflow.errors import GraphError

PACKAGE, _MODULE = "aiconfigurator-core", "aiconfigurator_core"
"""The optional package that holds the tables; nothing of it is copied or imported."""
SYSTEMS = {
    "A100": "a100_sxm",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "L40S": "l40s",
}
"""Kinds of devices, as the package calls them."""
TABLES = {
    "gemm_perf": "gemm",
    "generation_attention_perf": "attention",
    "context_attention_perf": "attention",
    "mla_generation_module_perf": "mla",
    "mla_context_module_perf": "mla",
    "moe_perf": "moe",
    "custom_allreduce_perf": "comm",
}
"""Folder of each table."""


def folder() -> Path:
    """Of the package. GraphError where it is not installed."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise GraphError(
            f"measured tables are read from the package {PACKAGE}, which is not installed here; "
            "pip install 'dataflow-rl[foresight]', or take other constants"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def version() -> str:
    """The installed version of the package; 'unknown' where only its folder is on the path."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class Curve:
    """Seconds over shapes, axis by axis; an axis inward may have other values at each value of this
    one.
    """

    at: tuple[float, ...]
    """Measured values of the outermost axis, ascending."""
    inner: tuple[Curve | float, ...]
    """At each of them: the other axes, or seconds."""

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]]) -> Curve:
        """Rows of a value for each axis, and seconds; of several at one shape the fastest, as a
        server would choose.
        """
        groups: dict[float, list[Sequence[float]]] = {}
        for row in rows:
            groups.setdefault(row[0], []).append(row[1:])
        at = sorted(groups)
        return cls(
            tuple(at),
            tuple(
                cls.of(groups[x]) if len(groups[x][0]) > 1 else min(row[0] for row in groups[x])
                for x in at
            ),
        )

    def cut(self, value: float) -> tuple[Curve | float, float]:
        """At one value of the outermost axis, and how many times it lies beyond what was measured
        (1: within).

        Between two shapes the logarithm of seconds is linear in the shape's. Beyond the largest,
        seconds grow as the shape does; below the smallest they stay.
        """
        if value <= self.at[0] or value >= self.at[-1]:
            last = value >= self.at[-1]
            edge = self.inner[-1 if last else 0]
            return _mixed(edge, edge, 0.0, value / self.at[-1] if last else 1.0), (
                value / self.at[-1] if last else self.at[0] / value
            )
        high = bisect.bisect_left(self.at, value)
        if self.at[high] == value:
            return self.inner[high], 1.0
        low = high - 1
        share = math.log(value / self.at[low]) / math.log(self.at[high] / self.at[low])
        return _mixed(self.inner[low], self.inner[high], share, 1.0), 1.0


def _mixed(low: Curve | float, high: Curve | float, share: float, times: float) -> Curve | float:
    """Interpolation between two curves; where their axes differ, over what both have."""
    if isinstance(low, Curve) and isinstance(high, Curve):
        if low is high and times == 1.0:
            return low
        ours, theirs = (
            dict(zip(low.at, low.inner, strict=True)),
            dict(zip(high.at, high.inner, strict=True)),
        )
        at = tuple(x for x in low.at if x in theirs)
        return Curve(at, tuple(_mixed(ours[x], theirs[x], share, times) for x in at))
    assert isinstance(low, float) and isinstance(high, float)
    return times * math.exp((1 - share) * math.log(low) + share * math.log(high))


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """One table, at what names a row."""

    name: str
    curve: Curve
    axes: tuple[str, ...]
    beyond: dict[tuple[str, str], str]
    """Requests outside of what the device's tables measured, by table and axis."""

    def cut(self, **fixed: float) -> KernelTable:
        """With its outermost axes fixed. GraphError where nothing is left that was measured at both
        sides.
        """
        curve: Curve | float = self.curve
        for axis, value in fixed.items():
            assert isinstance(curve, Curve)
            curve = self._cut(curve, axis, value)
        if not isinstance(curve, Curve) or not curve.at:
            raise GraphError(
                f"the measured table {self.name} has nothing near {fixed}; foresee with other ranks"
            )
        return KernelTable(
            name=self.name, curve=curve, axes=self.axes[len(fixed) :], beyond=self.beyond
        )

    def seconds(self, *shape: float) -> float:
        """At values of all axes that are left."""
        curve: Curve | float = self.curve
        for axis, value in zip(self.axes, shape, strict=True):
            assert isinstance(curve, Curve)
            curve = self._cut(curve, axis, value)
        assert isinstance(curve, float)
        return curve

    def _cut(self, curve: Curve, axis: str, value: float) -> Curve | float:
        part, beyond = curve.cut(value)
        if beyond > 1.0:
            edge = curve.at[-1] if value > curve.at[-1] else curve.at[0]
            self.beyond[self.name, axis] = (
                f"{self.name} at {axis} {value:,.0f}, measured to {edge:,.0f}"
            )
        return part


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The tables of one device."""

    kind: str
    server: str | None = None
    """Version of vLLM; None: of each table the newest."""
    beyond: dict[tuple[str, str], str] = field(default_factory=dict, compare=False)

    def table(self, name: str, axes: Sequence[str], **where: object) -> KernelTable:
        """Seconds over some columns, in rows with these values of others.

        GraphError where the package has no such table, version or rows: what it has.
        """
        path = self._path(name)
        columns = parquet.read_schema(path).names
        curve = _read(
            path,
            (*axes, "latency"),
            tuple((column, value) for column, value in where.items() if column in columns),
        )
        if not curve.at:
            measured = {column: _values(path, column) for column in where if column in columns}
            raise GraphError(
                f"{self.kind} has no measured {name} with {_text(where)}; found {_text(measured)};"
                " foresee with other constants"
            )
        return KernelTable(
            name=name.removesuffix("_perf"), curve=curve, axes=tuple(axes), beyond=self.beyond
        )

    def version(self, name: str) -> str:
        """The version of vLLM that a table was measured with."""
        return self._path(name).parent.name

    def _path(self, name: str) -> Path:
        if self.kind not in SYSTEMS:
            raise GraphError(
                f"{self.kind} has no measured kernels in {PACKAGE}; found {', '.join(SYSTEMS)};"
                " foresee with other constants"
            )
        tables = folder() / "systems" / "data" / SYSTEMS[self.kind] / TABLES[name] / "vllm"
        paths = {path.parent.name: path for path in tables.glob(f"*/{name}.parquet")}
        version = self.server or max(paths, key=_order, default=None)
        if version not in paths:
            raise GraphError(
                f"{self.kind} has no measured {name} of vLLM{f' {version}' if version else ''};"
                f" found {', '.join(sorted(paths, key=_order)) or 'none'}; foresee with one of"
                " them, or with other constants"
            )
        return paths[version]


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split("."))


@cache
def _read(path: Path, columns: tuple[str, ...], where: tuple[tuple[str, object], ...]) -> Curve:
    """Rows with these values; the last column is in milliseconds."""
    rows = parquet.read_table(
        path,
        columns=list(columns),
        filters=[(column, "==", value) for column, value in where] or None,
    )
    arrays = [rows.column(column).to_numpy().astype(float) for column in columns]
    return Curve.of(
        list(
            zip(
                *(array.tolist() for array in arrays[:-1]), (arrays[-1] / 1e3).tolist(), strict=True
            )
        )
    )


def _values(path: Path, column: str) -> list[object]:
    return sorted(set(parquet.read_table(path, columns=[column]).column(column).to_pylist()))


def _text(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
