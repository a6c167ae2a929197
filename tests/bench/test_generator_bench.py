"""Laws of the generator bench: every system makes exactly what was asked, and a row says what was
measured.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.generator.__main__ import run_all
from bench.generator.cases import (
    Load,
    make_load,
    make_policy,
)
from bench.generator.systems import OPEN, SYSTEMS, Late, Setting, System, Unavailable
from bench.generator.updates import ARMS, measure_updates
from bench.report import Report

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), "tiny")


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest, policy: Path) -> Iterator[System]:
    try:
        opened = OPEN[request.param](
            Setting(folder=policy, in_flight=16, precision="float32", threads=1)
        )
    except Unavailable as error:
        pytest.skip(str(error))
    yield opened
    opened.close()


def short(load: Load) -> Load:
    """The same load with rollouts of at most 12 tokens."""
    return Load(load.in_flight, load.prompts, tuple(1 + length % 12 for length in load.lengths))


def options(**changes: object) -> argparse.Namespace:
    plain = {
        "cases": ["tail"],
        "in_flight": [8],
        "systems": ["ours", "hf_generate"],
        "repeats": 2,
        "threads": 1,
        "precision": ["float32"],
        "model": "tiny",
        "turnover": 1,
        "limit_s": 60.0,
    }
    return argparse.Namespace(**{**plain, **changes})


@pytest.mark.timeout(300)
def test_every_system_makes_exactly_the_tokens_that_were_asked_of_each_rollout(
    system: System,
) -> None:
    load = short(make_load("tail", in_flight=16, rollouts=48, size="tiny"))
    for _ in range(2):
        made = system.run(load, DEADLINE_S)
        assert made.lengths == list(load.lengths)
        assert made.seconds > 0


def test_a_system_that_is_late_says_so_and_can_go_on(policy: Path) -> None:
    load = short(make_load("tail", in_flight=16, rollouts=48, size="tiny"))
    for name in ("ours", "hf_generate"):
        system = OPEN[name](Setting(folder=policy, in_flight=16, precision="float32", threads=1))
        with pytest.raises(Late, match="of 48 rollouts"):
            system.run(load, 1e-9)
        assert system.run(load, DEADLINE_S).lengths == list(load.lengths)
        system.close()


def test_a_system_that_cannot_run_or_fails_is_a_row_that_says_why(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(setting: Setting) -> System:
        raise Unavailable("not installed; pip install it")

    def broken(setting: Setting) -> System:
        raise ValueError("no such kernel")

    monkeypatch.setitem(OPEN, "vllm_cpu", missing)
    monkeypatch.setitem(OPEN, "hf_continuous", broken)
    for systems, fails in ((["vllm_cpu"], False), (["vllm_cpu", "hf_continuous"], True)):
        out = tmp_path / "rows.jsonl"
        assert run_all(policy, options(systems=systems), Report("generator", out)) is fails
        rows = {row["system"]: row for row in map(json.loads, out.read_text().splitlines())}
        assert "pip install" in rows["vllm_cpu"]["skipped"]
        if fails:
            assert rows["hf_continuous"]["failed"] == "ValueError: no such kernel"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_updates_are_adopted_only_in_the_arm_that_has_them(policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    measure_updates(policy, 8, "float32", options(repeats=1, turnover=2), Report("generator", out))
    rows = {row["system"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert list(rows) == list(ARMS)
    assert rows["updates"]["adopted_per_s"] > 0
    assert rows["still"]["adopted_per_s"] == rows["elsewhere"]["adopted_per_s"] == 0
    assert rows["updates"]["lost_percent"] is not None
