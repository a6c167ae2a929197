"""Breaks one law after the other in a copy of the tree, and says whether its test noticed.

python -m tests.laws                       python -m tests.laws --only ledger credit        python
                                           -m tests.laws --page
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from .law import ROOT
from .page import page
from .rooms import LAWS, ROOMS
from .trial import asked, copied, tried

PAGE = ROOT / "docs" / "laws.md"


def main() -> int:
    """0 when every law that was tried is noticed."""
    asks = argparse.ArgumentParser(
        prog="python -m tests.laws",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asks.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="words, of which one stands in the law, its test or symbol",
    )
    asks.add_argument(
        "--page", action="store_true", help=f"write {PAGE.relative_to(ROOT)}, and try nothing"
    )
    wishes = asks.parse_args()
    if wishes.page:
        PAGE.write_text(page(ROOMS))
        return 0
    chosen = [
        law
        for law in LAWS
        if not wishes.only
        or any(word in f"{law.says} {law.name} {law.symbol}" for word in wishes.only)
    ]
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="laws-") as folder:
        copy = copied(Path(folder))
        whole = asked(list(dict.fromkeys(law.test_id for law in chosen)), copy, 1200.0)
        if whole.said != "passed":
            print(f"the tests do not pass in a whole copy: {whole.said}")
            return 2
        for law in chosen:
            began = time.monotonic()
            word = tried(law, copy)
            unnoticed += not word.failed
            took = time.monotonic() - began
            print(
                f"{'noticed' if word.failed else 'NOT NOTICED':11} {took:5.1f} s  {law.name}\n     "
                f"   {word.said}"
            )
            sys.stdout.flush()
    print(f"{len(chosen)} laws tried, {unnoticed} not noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
