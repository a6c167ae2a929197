"""What a published schema of Kubernetes refuses of an object: unknown fields too, as strict
validation does.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "DATAFLOW_CRDS"
"""Names a folder with CustomResourceDefinitions as YAML, as the repositories of JobSet and KubeRay
have them."""
TYPES = {
    "object": Mapping,
    "array": list | tuple,
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
}


def schema_of(api: str, kind: str) -> Mapping[str, Any]:
    """Of a kind at a version, such as jobset.x-k8s.io/v1alpha2 JobSet; the test is skipped where it
    is not at hand.
    """
    yaml = pytest.importorskip("yaml")
    group, _, version = api.partition("/")
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} names no folder with the published schema of {kind}")
    for path in sorted(Path(folder).rglob("*.yaml")):
        found = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        spec = found.get("spec", {})
        if spec.get("group") == group and spec.get("names", {}).get("kind") == kind:
            (one,) = [
                each for each in spec["versions"] if each["name"] == version and each["served"]
            ]
            return one["schema"]["openAPIV3Schema"]  # type: ignore[no-any-return]
    pytest.skip(f"{folder} has no schema of {kind} in {group}")


def faults(schema: Mapping[str, Any], value: Any, where: str = "") -> Iterator[str]:
    """What is wrong, and where."""
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str):
            yield f"{where}: neither a number nor a text"
        return
    wanted = schema.get("type")
    is_bool = isinstance(value, bool) and wanted in ("integer", "number")
    if wanted is not None and (not isinstance(value, TYPES[wanted]) or is_bool):
        yield f"{where}: {value!r} is no {wanted}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    if wanted == "array":
        for at, each in enumerate(value):
            yield from faults(schema["items"], each, f"{where}[{at}]")
    if wanted == "object":
        yield from (
            f"{where}: {name} is missing"
            for name in schema.get("required", ())
            if name not in value
        )
        known, more = schema.get("properties"), schema.get("additionalProperties")
        for name, each in value.items():
            if known and name in known:
                yield from faults(known[name], each, f"{where}.{name}")
            elif isinstance(more, Mapping):
                yield from faults(more, each, f"{where}.{name}")
            elif known and not schema.get("x-kubernetes-preserve-unknown-fields"):
                yield f"{where}: {name} is unknown"
