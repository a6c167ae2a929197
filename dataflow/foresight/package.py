"""Where the optional package with measured tables lies; it is read there, and nothing of it is copied or imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from dataflow.errors import GraphError

NAME, MODULE = "aiconfigurator-core", "aiconfigurator_core"


def folder() -> Path:
    """Of the package. GraphError where it is not installed."""
    found = importlib.util.find_spec(MODULE)
    if found is None or not found.submodule_search_locations:
        raise GraphError(
            f"measured tables are read from the package {NAME}, which is not installed here; "
            f"pip install 'dataflow-rl[foresight]', or take the constants of data sheets"
        )
    return Path(next(iter(found.submodule_search_locations)))


def version() -> str:
    """As installed; 'unknown' where only its folder is on the path."""
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
