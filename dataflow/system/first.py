"""What is put right before anything else is imported: signals, streams that are closed, and whose
the packages are.
"""

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

from dataflow.system.interrupts import end_as_others_do

_ROOT = Path(__file__).resolve().parents[2]


def open_streams() -> None:
    """Standard streams that are closed (`>&-`) lead nowhere from here on, so that no file or socket
    takes their numbers, and whoever prints finds one.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def stranger(name: str) -> Path | None:
    """What `import NAME` finds, a file or a folder, where it is not this project's; None where it
    is, or there is none.
    """
    with contextlib.suppress(ValueError):  # a module that somebody has made himself
        spec = importlib.util.find_spec(name)
        place = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
        if place and Path(place).resolve() not in (_ROOT / name, _ROOT / name / "__init__.py"):
            return Path(place)
    return None


def check_packages() -> None:
    """Say whose the packages are that a user's file hides, by its name. Errors: ImportError for one
    that nothing goes without.
    """
    if (path := stranger("transport")) is not None:
        raise ImportError(
            f"'transport' is {path}, which hides Dataflow RL's package of that name at {_ROOT};"
            " rename it"
        )
    for name in ("operators", "graphs"):
        if (path := stranger(name)) is not None:
            hides = f"hides Dataflow RL's package of that name at {_ROOT}"
            print(
                f"note: '{name}' is {path}, which {hides}; rename it to import from there",
                file=sys.stderr,
            )


end_as_others_do()
open_streams()
check_packages()
