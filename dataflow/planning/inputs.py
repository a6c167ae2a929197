"""All inputs of a plan beside its graph, as plain values: the same inputs give the same plan."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dataflow.group_bytes import MESSAGE_BYTES
from dataflow.planning.gpu_groups import Wishes
from dataflow.planning.hosts import Devices
from dataflow.planning.pins import Place


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What `make_plan` takes, by the names of its parameters: `make_plan(graph,
    **inputs.arguments)`.

    >>> import msgspec
    >>> from dataflow import Devices
    >>> from dataflow.planning.inputs import PlanInputs
    >>> inputs = PlanInputs(devices=Devices(cpus=2), scale={100: {"generator": 3}})
    >>> msgspec.convert(msgspec.to_builtins(inputs), PlanInputs) == inputs
    True
    """

    devices: Devices
    gpus: Wishes | Literal["shared"] | None = None
    replicas: Mapping[str, int] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    steps: int | None = None
    scale: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    weights: str | None = None
    listen: str = ""
    message_bytes: int = MESSAGE_BYTES
    link_gbps: float | None = None
    place: Place = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """For `make_plan`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def digest(value: Any) -> str:
    """64 hexadecimal digits, the same for equal values in every process and Python: of plain values
    and dataclasses.
    """
    plain = json.dumps(
        value, default=_fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True
    )
    return hashlib.sha256(plain.encode()).hexdigest()


def _fields(value: Any) -> dict[str, Any]:
    """Of a dataclass; a TypeError, as JSON's, of anything else."""
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"a digest is of plain values, but found {type(value).__name__}")
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
