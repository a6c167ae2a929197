"""Starts vLLM's process by path, with the interpreter of vLLM's environment: it gets this project's
packages from where this file lies, and all others from its own.
"""

import ctypes
import multiprocessing
import os
import secrets
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
    shared_memory._make_filename = lambda: f"/{mark}_{secrets.token_hex(4)}"  # type: ignore[attr-defined]
    if "libiomp5" in os.environ.get("LD_PRELOAD", ""):
        # Intel's OpenMP registers itself in a file, which nobody needs by its name.
        ctypes.CDLL(None).omp_get_max_threads()
        Path(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").unlink(missing_ok=True)

if __name__ == "__main__":
    from operators.engine.vllm.server import main

    sys.exit(main(socket.socket(fileno=int(sys.argv[1]))))
