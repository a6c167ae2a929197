"""The wheel of this tree, and an environment that holds it with what it declares to need and
nothing else.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
SOURCES = (
    "dataflow",
    "operators",
    "graphs",
    "transport",
    "dataflow_rl.py",
    "pyproject.toml",
    "README.md",
)


def build(folder: Path) -> Path:
    """The wheel, made from a copy of the tree, so that the tree stays as it is."""
    copy = folder / "tree"
    for name in SOURCES:
        source, target = ROOT / name, copy / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    pip(*["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir"], str(folder), str(copy))
    (made,) = folder.glob("*.whl")
    return made


def environment(folder: Path, wheel: Path) -> Path:
    """The interpreter of a new environment with a wheel; what the wheel requires is linked from
    this one's packages.
    """
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60
    )
    python = folder / "bin" / "python"
    pip("--python", str(python), *["install", "--no-deps", "--no-index"], str(wheel))
    (packages,) = folder.glob("lib/python*/site-packages")
    (installed,) = packages.glob("dataflow_rl-*.dist-info")
    for needed in required(Distribution.at(installed)):
        for top in {
            file.parts[0]
            for file in needed.files or ()
            if file.parts[0] not in ("..", "__pycache__")
        }:
            place = packages / top
            if not place.exists():
                place.symlink_to(Path(str(needed.locate_file(top))))
    return python


def required(one: Distribution) -> Iterator[Distribution]:
    """What it requires, with what these require, and so on; no extras but those that a requirement
    names.
    """
    known: set[tuple[str, str]] = set()

    def walk(each: Distribution, extra: str) -> Iterator[Distribution]:
        for wanted in map(Requirement, each.requires or ()):
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                for more in ("", *wanted.extras):
                    if (wanted.name, more) not in known:
                        known.add((wanted.name, more))
                        found = distribution(wanted.name)
                        yield found
                        yield from walk(found, more)

    yield from walk(one, "")


def pip(*arguments: str) -> None:
    """Run pip; what it says stands in the error."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
