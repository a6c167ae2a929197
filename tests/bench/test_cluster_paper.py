"""Large runs are planned with nothing set by hand; their plans count what is tracked."""

import re
from pathlib import Path

import pytest

from bench.cluster.paper import TARGETS, chosen, lines
from bench.memory.planned import CONFIGS, write

RUNS_S = {"7b": 300, "70b": 600, "405b": 900}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.timeout(RUNS_S[n])) for n in TARGETS]
)
def test_nothing_is_refused_and_every_number_has_a_source(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    told = list(lines(chosen(target, write(CONFIGS[target.model], tmp_path))))
    by_what = {what: value for what, value, _ in told}
    assert all(source for *_, source in told)
    assert {"asked", "rank of generator", "communicators", "a version of the weights"} <= {*by_what}
    counted = [value for value in by_what.values() if "planned" in value]
    assert len(counted) == 2, "of trainer and generator"
    for value in counted:
        (over,) = re.findall(r"\(([+-][\d.]+)%\)", value)
        assert abs(float(over)) <= 10
    (times,) = re.findall(r"([\d.]+) times the floor", by_what["rounds of an exchange"])
    assert 1 <= float(times) < 1.6
