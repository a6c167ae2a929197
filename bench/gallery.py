"""Draws the pictures of docs/gallery.md: each graph of graphs/ as this machine would place it;
nothing is trained.

python -m bench.gallery
"""

import contextlib
import importlib
import sys
import tempfile
from pathlib import Path

from dataflow import main as run_main

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "gallery"
NAMES = tuple(
    sorted(path.stem for path in (ROOT / "graphs").glob("*.py") if path.stem != "__init__")
)
ROW = '{"prompt": "2+2=", "answer": "4"}\n'
TEXT = (
    "--policy",
    "policy",
    "--prompts",
    "train.jsonl",
    "--held-out",
    "test.jsonl",
    "--reward",
    "exact",
)
FLAGS = {
    "aipo": TEXT,
    "dapo": TEXT,
    "distill": (*TEXT, "--teacher", "teacher"),
    "grpo": TEXT,
    "ppo": TEXT,
    "rloo": TEXT,
    "sft": TEXT,
}


def main() -> int:
    """Draw them; 1 where a graph needs a package that is not here, whose picture stays as it is."""
    OUT.mkdir(exist_ok=True)
    left_out = 0
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        for name in ("train.jsonl", "test.jsonl"):
            Path(name).write_text(ROW)
        for name in NAMES:
            build = importlib.import_module(f"graphs.{name}").build
            try:
                run_main(build, args=[*FLAGS.get(name, ()), "--draw", str(OUT / f"{name}.svg")])
            except SystemExit:  # it has said what is missing
                left_out = 1
    return left_out


if __name__ == "__main__":
    sys.exit(main())
