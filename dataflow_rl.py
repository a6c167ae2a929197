"""The commands `dataflow` and `dataflow-rl`, which see first that the package `dataflow` is
theirs.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
"""Where the packages lie that belong to each other."""


def main() -> None:
    """Run the command line; status 2 where another package stands in the place of this
    project's.
    """
    try:
        check()
        from dataflow.cli import main as run
    except ImportError as error:
        print(f"dataflow-rl cannot start: {error}", file=sys.stderr)
        sys.exit(2)
    run()


def check(name: str = "dataflow") -> None:
    """See that the package is the one beside this module. Errors: ImportError, which names the
    other one.
    """
    spec = importlib.util.find_spec(name)
    place = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
    origin = Path(place).resolve() if place else None
    if origin != ROOT / name / "__init__.py":
        raise ImportError(
            f"'{name}' is {origin or 'no package that Python finds'}, and not Dataflow RL's at"
            f" {ROOT / name}; rename that file or folder, or start from another folder, so that it"
            " is not found first"
        )
    if "dataflow.graph" not in origin.read_text("utf-8"):
        raise ImportError(
            f"{ROOT / name} is of another project called '{name}'; pip uninstall {name}, then pip"
            " install --force-reinstall dataflow-rl"
        )


if __name__ == "__main__":
    main()
