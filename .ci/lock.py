"""Writes constraints.txt from environments of several Pythons: python .ci/lock.py .venv311 .venv312
.venv313.
"""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HEAD = """\
# The versions that this project's tests were green with, for `make venv` alone; \
CONTRIBUTING.md says how to renew them.
# torch is the build that pip finds for this machine.
"""


def frozen(environment: str) -> tuple[str, dict[str, str]]:
    """The Python of an environment, as 3.12, and the versions of what is installed in it, without
    their builds.
    """
    python = str(Path(environment) / "bin" / "python")
    asked = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    asked = [
        python,
        "-m",
        "pip",
        "list",
        "--exclude-editable",
        "--format=freeze",
        "--disable-pip-version-check",
    ]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    packages = dict(line.lower().replace("_", "-").split("+")[0].split("==") for line in lines)
    packages.pop("pip", None)
    return version, packages


def lock(environments: dict[str, dict[str, str]]) -> list[str]:
    """A line for each package; one for each Python where they have different versions of it."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for python, packages in environments.items():
        for package, version in packages.items():
            found[package][python] = version
    lines = []
    for package, versions in sorted(found.items()):
        if len(set(versions.values())) == 1:
            lines.append(f"{package}=={next(iter(versions.values()))}")
        else:
            lines += [
                f'{package}=={version}; python_version == "{python}"'
                for python, version in versions.items()
            ]
    return lines


if __name__ == "__main__":
    Path("constraints.txt").write_text(
        HEAD + "\n".join(lock(dict(map(frozen, sys.argv[1:])))) + "\n"
    )
