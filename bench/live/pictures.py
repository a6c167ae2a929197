"""The pictures of the page of a run: python -m bench.live.pictures docs; `make pictures` takes all.

The sorting demo runs with its page open in a headless Chromium;
once it has made enough steps the page is photographed, in light and in dark, and one rollout. Each
is a PNG of two hundred kilobytes at most, as the browser packs it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from bench.live.windows import served

STEPS = 150
"""That the run has made by then."""
WIDTH, HEIGHT = 1280, 800
MOST_BYTES = 200_000
PAGE, ROLLOUT = "live.png", "live-rollout.png"


def main() -> int:
    """Take them; the exit status is 1 where one is too large."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.live.pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where they go")
    parser.add_argument("--policy", type=Path, help="folder of the policy, to be made once")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from rigs.browsing.chromium import browser

    with (
        tempfile.TemporaryDirectory() as temporary,
        served(Path(temporary), options.policy) as place,
        browser(Path(temporary) / "browser") as page,
    ):
        page.look_like(WIDTH, HEIGHT)
        page.open(place.url)
        page.wait("document.querySelectorAll('.chart path.a').length >= 8", 60)
        while len(place.metrics.read_bytes().splitlines()) < STEPS:
            time.sleep(0.5)
        page.wait("document.querySelectorAll('#charts .line').length >= 20", 60)
        page.ask("document.documentElement.style.scrollBehavior = 'auto'")
        page.photograph(options.folder / PAGE)
        page.look_like(WIDTH, HEIGHT, dark=True)
        page.ask("document.querySelector('#question button').click()")
        page.wait("document.querySelectorAll('#rows tbody a').length > 8", 60)
        page.ask(
            "[...document.querySelectorAll('#rows thead button')].find(b => b.innerText ==="
            " 'advantage').click()"
        )
        page.wait(
            "document.querySelector('#rows"
            " th[aria-sort=descending]')?.innerText.startsWith('advantage')",
            60,
        )
        page.ask("document.querySelector('#rows tbody a').click()")
        page.wait("document.querySelectorAll('.tokens span[class^=t]').length > 2", 60)
        time.sleep(0.5)
        page.photograph(options.folder / ROLLOUT)
    sizes = {name: (options.folder / name).stat().st_size for name in (PAGE, ROLLOUT)}
    print(sizes)
    return int(max(sizes.values()) > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
