"""What a text names in a user's file or module: `path/to/file.py:name`, `package.module:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from dataflow.errors import GraphError


def named(place: str, text: str, kind: str) -> Any:
    """What stands at a place. text: as the user typed it; kind: what is looked for, as messages
    call it.

    Raises GraphError where there is nothing.
    """
    path, _, name = place.rpartition(":")
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise GraphError(
                f"the {kind} {text!r} names a file that is not there; check the path {path!r}"
            )
        module = _loaded(Path(path))
    else:
        try:
            module = importlib.import_module(path)
        except Exception as error:
            raise GraphError(
                f"the {kind} {text!r} names module '{path}', which cannot be imported ({error}); "
                f"install it, or name a file as path/to/file.py:name"
            ) from error
    target = module
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is None:
        raise GraphError(f"{path} has no {kind} {name!r}; define it there, or name another")
    return target


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise GraphError(
            f"{path} cannot be imported: {type(error).__name__}: {error}; mend the file"
        ) from error
    return module
