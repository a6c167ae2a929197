"""Laws of the paused bench: memory at two moments, queues against their bounds, the pace against
the one before.
"""

import json
from pathlib import Path

import pytest

from bench import paused


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_paused_run_is_measured_from_outside_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paused, "WINDOW_S", 2.0)
    arguments = [
        "--seconds",
        "6",
        "--warm",
        "1",
        "--settle",
        "1",
        "--policy",
        str(tmp_path / "policy"),
    ]
    assert paused.main([*arguments, "--json", str(tmp_path / "figures")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "figures").read_text().splitlines()]
    names = {line["system"] for line in lines if line["case"] == "memory"}
    assert {"scheduler", "forkserver", "trainer-0", "generator-0", "reward-0", "prompts-0"} <= names
    assert {line["within"] for line in lines if "within" in line} == {"yes"}
    assert all(line["steps_per_s"] > 0 for line in lines if line["case"] == "pace")
    (verdict,) = [line for line in lines if line["case"] == "verdict"]
    assert verdict["clean"] == "yes" and not verdict["faults"] and verdict["paused_s"] >= 6
