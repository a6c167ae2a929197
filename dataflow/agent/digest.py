"""What two hosts have to have in common to run one program: versions, code, the graph that is
built, and its plan.
"""

import functools
import hashlib
import inspect
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dataflow.agent.messages import Built
from dataflow.graph import Graph
from dataflow.history.describe import graph_facts
from dataflow.history.launch import Launch
from dataflow.planning.inputs import digest
from dataflow.planning.plan import Plan
from dataflow.system.child import ROOT

_ENGINE = ("dataflow", "operators", "transport")
_SHOWN = 12
_DEEP = 4
"""An operator's functions stand in its knobs, or so many values below."""


def versions() -> dict[str, str]:
    """Of Python, torch and the engine, as this process has them; torch may be built for other
    devices.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, "torch": _installed("torch").partition("+")[0], "engine": _engine()}


def other_versions(name: str, its: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """What host `name` has another version of, for people; empty where it has none."""
    differences = [
        f"{part} {its.get(part, 'nothing')} and the scheduler {ours[part]}"
        for part in ours
        if its.get(part) != ours[part]
    ]
    if not differences:
        return ""
    return (
        f"host '{name}' has {'; '.join(differences)}; give all hosts of a run the same versions,"
        " from one image or one file system"
    )


def built(graph: Graph, plan: Plan, launch: Launch) -> Built:
    """What a host has made of the program that `launch` names."""
    files = {str(path): _sum([path]) for path in program_files(graph, launch)}
    return Built(digest=digest([graph_facts(graph), plan.digest(), files])[:_SHOWN], files=files)


def other_program(name: str, its: Built, ours: Built) -> str:
    """In what a host's program is another one, for people; empty where it is the same."""
    if its.digest == ours.digest:
        return ""
    changed = [
        f"'{file}' is {its.files.get(file, 'not there')} on it and"
        f" {ours.files.get(file, 'not there')} here"
        for file in sorted({*its.files, *ours.files})
        if its.files.get(file) != ours.files.get(file)
    ]
    parts = (
        "; ".join(changed)
        or "its files are the same, so it reads other data or other flags, or draws something"
    )
    return (
        f"host '{name}' has another version of the program: what it builds has digest {its.digest},"
        f" and what the scheduler built {ours.digest}; {parts}; bring the same version to all hosts"
    )


def program_files(graph: Graph, launch: Launch) -> list[Path]:
    """Files in which the program's own code stands: its main file, and those of the functions in
    its operators.
    """
    paths = {launch.main_file}
    for operator in graph.operators.values():
        paths |= {
            Path(file).resolve()
            for function in _functions(operator, _DEEP)
            if (file := inspect.getsourcefile(function))
        }
    return sorted(
        path for path in paths if path is not None and path.is_file() and not _is_installed(path)
    )


def _functions(value: Any, deep: int) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from _functions(value.func, deep)
        value = [*value.args, *value.keywords.values()]
    if inspect.isfunction(value):
        yield inspect.unwrap(value)
    elif deep and is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _functions(getattr(value, item.name, None), deep - 1)
    elif deep and isinstance(value, list | tuple | set | frozenset):
        for item in value if len(value) < 100 else ():
            yield from _functions(item, deep - 1)
    elif deep and isinstance(value, Mapping):
        for item in value.values():
            yield from _functions(item, deep - 1)


def _is_installed(path: Path) -> bool:
    """Whether a file comes with Python, a package or the engine, whose versions are compared as
    such.
    """
    packages = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    return any(
        path.is_relative_to(place.resolve())
        for place in [*packages, *(ROOT / name for name in _ENGINE)]
    )


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


@functools.cache
def _engine() -> str:
    """Of its sources, whether they were installed or not."""
    return _sum(sorted(path for room in _ENGINE for path in (ROOT / room).rglob("*.py")))


def _sum(paths: Iterable[Path]) -> str:
    summed = hashlib.sha256()
    for path in paths:
        summed.update(path.name.encode() + b"\0" + path.read_bytes())
    return summed.hexdigest()[:_SHOWN]
