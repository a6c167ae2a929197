"""Writes docs/refused.md from the code; what it lacks afterwards is said: python -m
tests.refused.
"""

import sys

from .code import refusals
from .page import PAGE, lacks, written


def main() -> int:
    """0 when every refusal has its reason."""
    found = refusals()
    PAGE.write_text(written(PAGE.read_text("utf-8"), found), "utf-8")
    left = lacks(PAGE.read_text("utf-8"), found)
    print("\n".join(left) or f"{PAGE.name} is complete")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
