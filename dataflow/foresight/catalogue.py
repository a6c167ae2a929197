"""Kinds of devices, by their makers' data sheets: memory, its bandwidth, rates of matrix products,
links.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dataflow.errors import GraphError

GB, GB_PER_S, TERA = 10**9, 1e9, 1e12
_COMMON = (
    "NVIDIA",
    "AMD",
    "Instinct",
    "GeForce",
    "RTX",
    "SXM",
    "SXM4",
    "SXM5",
    "OAM",
    "HBM3",
    "HBM3e",
)
"""Words in names that do not tell the kinds here apart."""
_SHARED_LINK = 12.5 / 8
"""GB/s of each of eight devices whose node has one link of 100 Gb/s to others."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceKind:
    """One accelerator of a node.

    >>> from dataflow.foresight.catalogue import device_kind
    >>> device_kind("H100").per_node
    8
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    operations_per_s: Mapping[str, float] = field(repr=False)
    """Of dense matrix products, by the dtype of their operands; an addition and a multiplication
    are two."""
    within_bytes_per_s: float
    """To the other devices of its node, each way."""
    between_bytes_per_s: float = 50 * GB_PER_S
    """To other nodes, each way: a link of 400 Gb/s for each device, where the data sheet of a node
    says no other."""
    host_bytes_per_s: float = 64 * GB_PER_S
    """To main memory, each way: PCIe 5.0 x16, where the data sheet says no other."""
    per_node: int = 8
    source: str = field(repr=False)

    def rate(self, dtype: str) -> float:
        """Operations per second. GraphError where the device has none for it."""
        if dtype not in self.operations_per_s:
            dtypes = ", ".join(self.operations_per_s)
            raise GraphError(
                f"{self.name} has no matrix products in {dtype}; found rates for {dtypes}; take one"
                " of them"
            )
        return self.operations_per_s[dtype]


def _gpu(
    name: str,
    memory: int,
    bandwidth: float,
    bfloat16: float,
    fp8: float | None,
    within: float,
    source: str,
    **others: float,
) -> DeviceKind:
    """memory: GB. bandwidth: TB/s. bfloat16, fp8, fp4: tera-operations per second, dense. within:
    GB/s, each way.
    """
    rates = {"bfloat16": bfloat16 * TERA, "float16": bfloat16 * TERA} | (
        {"fp8": fp8 * TERA} if fp8 else {}
    )
    rates |= {"fp4": others["fp4"] * TERA} if "fp4" in others else {}
    return DeviceKind(
        name=name,
        memory_bytes=memory * GB,
        memory_bytes_per_s=bandwidth * TERA,
        operations_per_s=rates,
        within_bytes_per_s=within * GB_PER_S,
        between_bytes_per_s=others.get("between", 50) * GB_PER_S,
        host_bytes_per_s=others.get("host", 64) * GB_PER_S,
        source=source,
    )


CATALOGUE = {
    kind.name: kind
    for kind in (
        _gpu(
            "A100-40",
            40,
            1.555,
            312,
            None,
            300,
            "NVIDIA A100 40GB SXM data sheet; HDR InfiniBand",
            between=25,
            host=32,
        ),
        _gpu(
            "A100",
            80,
            2.039,
            312,
            None,
            300,
            "NVIDIA A100 80GB SXM data sheet; HDR InfiniBand",
            between=25,
            host=32,
        ),
        _gpu("H100", 80, 3.35, 989, 1979, 450, "NVIDIA H100 SXM data sheet"),
        _gpu("H200", 141, 4.8, 989, 1979, 450, "NVIDIA H200 SXM data sheet"),
        _gpu(
            "B200",
            180,
            8.0,
            2250,
            4500,
            900,
            "NVIDIA DGX B200 data sheet, an eighth of the system",
            fp4=9000,
        ),
        _gpu(
            "L40S",
            48,
            0.864,
            362,
            733,
            32,
            "NVIDIA L40S data sheet; PCIe 4.0 x16",
            between=25,
            host=32,
        ),
        _gpu(
            "L4",
            24,
            0.3,
            121,
            242.5,
            32,
            "NVIDIA L4 data sheet, half of its rates with sparsity; PCIe 4.0 x16",
            between=_SHARED_LINK,
            host=32,
        ),
        _gpu(
            "A10G",
            24,
            0.6,
            70,
            None,
            32,
            "NVIDIA A10G data sheet; PCIe 4.0 x16; eight of them as in g5.48xlarge",
            between=_SHARED_LINK,
            host=32,
        ),
        _gpu(
            "RTX4090",
            24,
            1.008,
            165.2,
            330.3,
            32,
            "NVIDIA Ada GPU architecture white paper, sums in float32; PCIe 4.0 x16",
            between=_SHARED_LINK,
            host=32,
        ),
        _gpu(
            "RTX3090",
            24,
            0.936,
            71,
            None,
            32,
            "NVIDIA Ampere GA102 GPU architecture white paper, sums in float32; PCIe 4.0 x16",
            between=_SHARED_LINK,
            host=32,
        ),
        _gpu("H20", 96, 4.0, 148, 296, 450, "NVIDIA H20 data sheet as its vendors quote it"),
        _gpu("MI300X", 192, 5.3, 1307, 2615, 448, "AMD Instinct MI300X data sheet"),
        DeviceKind(
            name="cpu",
            memory_bytes=1024 * GB,
            memory_bytes_per_s=13 * GB_PER_S,
            within_bytes_per_s=6 * GB_PER_S,
            operations_per_s=dict.fromkeys(("float32", "bfloat16", "float16"), 0.147 * TERA),
            source=(
                "one core of 2.3 GHz with two units of AVX-512, 16 additions and multiplications"
                " each; copies by one thread, and between two processes, as measured on this"
                " project's machines"
            ),
        ),
    )
}
"""By name. No rate counts sparsity."""


def device_kind(name: str) -> DeviceKind:
    """The kind of that name, however it is written. GraphError with the nearest one, and all, where
    there is none.

    >>> device_kind("rtx_4090").name, device_kind("4090").name, device_kind("A100-80GB").name
    ('RTX4090', 'RTX4090', 'A100')
    """
    plain = _plain(name)
    for kind in CATALOGUE.values():
        if plain in (_plain(kind.name), f"{_plain(kind.name)}{kind.memory_bytes // GB}"):
            return kind
    near = difflib.get_close_matches(name.upper(), CATALOGUE, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise GraphError(
        f"a kind of device that nobody knows; found {name!r}; {hint}those known are"
        f" {', '.join(sorted(CATALOGUE))}"
    )


def _plain(name: str) -> str:
    """Letters and digits alone, in capitals, without words that tell no kinds apart and the unit of
    a memory.
    """
    return re.sub(r"NVIDIA|GEFORCE|RTX|SXM\d?|[^A-Z0-9]|GB$", "", name.upper())


def kind_named(name: str) -> DeviceKind:
    """The kind of a device by what its maker's driver calls it; of other boards with the same chip
    (PCIe, NVL, another memory) no figures are here. GraphError with the nearest kind for those.

    >>> names = "H100 80GB HBM3", "A100-SXM4-40GB", "GeForce RTX 4090"
    >>> [kind_named(f"NVIDIA {name}").name for name in names]
    ['H100', 'A100-40', 'RTX4090']
    """
    parts = [part for part in re.split(r"[\s-]+", name) if part and part not in _COMMON]
    kinds = {_plain(kind): kind for kind in CATALOGUE if kind != "cpu"}
    unknown = [part for part in parts if _plain(part) not in kinds]
    chips = [CATALOGUE[kinds[_plain(part)]] for part in parts if _plain(part) in kinds]
    if len(chips) == 1:
        boards = [
            chips[0],
            *(CATALOGUE[kind] for kind in CATALOGUE if kind.startswith(f"{chips[0].name}-")),
        ]
        for board in boards:
            if all(part == f"{board.memory_bytes // GB}GB" for part in unknown):
                return board
    near = (
        chips[0].name
        if chips
        else next(
            iter(
                difflib.get_close_matches(
                    max(parts, key=len, default=""), CATALOGUE, n=1, cutoff=0.5
                )
            ),
            "",
        )
    )
    do = (
        f"the nearest kind is {near}" if near else f"those known are {', '.join(sorted(CATALOGUE))}"
    )
    raise GraphError(
        "a run is foreseen on kinds of accelerators that are known, but this machine's is called"
        f" {name!r}; {do}: ask with --foresee for as many of them, or run without --constants"
    )
