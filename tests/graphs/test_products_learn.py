"""The experiment with a calculator: what the policy learns, and that it learns it from what the
calculator says.
"""

from pathlib import Path

import pytest

from dataflow import main
from dataflow.folder.run_folder import RunFolder
from graphs.products import STEPS, build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def rise(folder: Path, *flags: str) -> float:
    """By how much the share of held-out products that the policy gets has risen."""
    runs = folder / f"runs{len(flags)}"
    main(
        build,
        args=[
            "--policy",
            str(folder / "policy"),
            "--runs",
            str(runs),
            "--steps",
            str(STEPS),
            "--quiet",
            *flags,
        ],
    )
    lines = RunFolder.open((runs / "latest").resolve()).read_metrics()
    found = {line["step"]: line["eval_accuracy"] for line in lines if "eval_accuracy" in line}
    return float(found[max(found)] - found[0])


def test_held_out_success_rises_with_the_calculator_and_hardly_without_it(tmp_path: Path) -> None:
    with_it = rise(tmp_path)
    assert with_it >= 0.3
    assert rise(tmp_path, "--blank") < with_it / 2
