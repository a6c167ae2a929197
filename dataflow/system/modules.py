"""Modules, and what stands in them, by the places that users name: a module's name, or the path of
a file that ends with .py.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from dataflow.errors import GraphError


def module_at(place: str, *, suffix: str = "") -> ModuleType:
    """The module; a file is executed each time. suffix: of the name that a file's module has
    beside its own, so that it hides no library. Errors: whatever importing it raises.
    """
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(f"{Path(place).stem}{suffix}", place)
    assert spec is not None and spec.loader is not None, "it ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module


def named(place: str, text: str, kind: str) -> Any:
    """What stands at a place. text: as the user typed it; kind: what is looked for, as messages
    call it.

    Raises GraphError where there is nothing.
    """
    path, _, name = place.rpartition(":")
    is_file = path.endswith(".py")
    if is_file and not Path(path).is_file():
        raise GraphError(
            f"the {kind} {text!r} names a file that is not there; check the path {path!r}"
        )
    try:
        target: Any = module_at(path)
    except Exception as error:
        if is_file:
            raise GraphError(
                f"{path} cannot be imported: {type(error).__name__}: {error}; mend the file"
            ) from error
        raise GraphError(
            f"the {kind} {text!r} names module '{path}', which cannot be imported ({error}); "
            f"install it, or name a file as path/to/file.py:name"
        ) from error
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is None:
        raise GraphError(f"{path} has no {kind} {name!r}; define it there, or name another")
    return target
