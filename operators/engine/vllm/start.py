"""Starts vLLM's process by path, with the interpreter of vLLM's environment: it gets this project's
packages from where this file lies, and all others from its own.
"""

import multiprocessing
import os
import socket
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing import shared_memory
from pathlib import Path

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[2]
PACKAGES = ("dataflow", "operators", "transport")


class OwnPackages:
    """Finds this project's packages beside others of another environment."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        """As of any finder of modules."""
        return PathFinder.find_spec(name, [str(TREE)]) if name in PACKAGES else None


if __name__ in ("__main__", "__mp_main__"):  # vLLM's ranks read this file, too
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    sys.meta_path.append(OwnPackages)
    # What vLLM's ranks share in memory has a name by which the parent finds what is left of it.
    mark = os.environ["DATAFLOW_VLLM_MARK"]
    multiprocessing.current_process()._config["semprefix"] = f"/{mark}"  # type: ignore[attr-defined]
    shared_memory._SHM_NAME_PREFIX = f"/{mark}_"  # type: ignore[attr-defined]
    # Of whole names: 14 by itself, which is what other systems than Linux allow.
    shared_memory._SHM_SAFE_NAME_LENGTH = len(f"/{mark}_") + 16  # type: ignore[attr-defined]

if __name__ == "__main__":
    from operators.engine.vllm.server import main

    sys.exit(main(socket.socket(fileno=int(sys.argv[1]))))
