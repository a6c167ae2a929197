"""Laws of the generator bench: every system makes exactly what was asked, and a row says what was
measured.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.generator.__main__ import affordable, check, figures, run_all
from bench.generator.cases import (
    GROUP_SIZE,
    HEAVY,
    MEDIAN_TOKENS,
    Load,
    make_load,
    make_policy,
    percentile,
    tail_lengths,
    text_of,
)
from bench.generator.systems import OPEN, SYSTEMS, Late, Made, Setting, System, Unavailable
from bench.generator.updates import ARMS, lost, measure_updates
from bench.report import Report

ROW = {
    "case",
    "in_flight",
    "system",
    "tokens_per_s",
    "rollouts_per_s",
    "seconds",
    "ratio",
    "threads",
    "precision",
    "rollouts",
    "tokens_p50",
    "tokens_p99",
}
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


def test_two_rows_of_the_same_system_are_of_the_same_load() -> None:
    one, other = (make_load("tail", in_flight=16, rollouts=64, size="small") for _ in range(2))
    assert one.lengths == other.lengths
    assert all((a == b).all() for a, b in zip(one.prompts, other.prompts, strict=True))
    assert len(one.prompts) * GROUP_SIZE == len(one.lengths) == 64


@pytest.mark.parametrize("count", [512, 2048])
def test_the_tail_has_a_99th_percentile_of_ten_medians(count: int) -> None:
    lengths = tail_lengths(count, 256, seed=3)
    assert len(lengths) == count
    assert percentile(lengths, 50) == pytest.approx(MEDIAN_TOKENS, abs=1)
    assert percentile(lengths, 99) == pytest.approx(HEAVY * statistics.median(lengths), rel=0.05)
    assert lengths != sorted(lengths)
    whole = sum(lengths) / count
    for first in range(0, count, 256):
        assert sum(lengths[first : first + 256]) / 256 == pytest.approx(whole, rel=0.05)


def test_the_tokenizer_gives_a_prompt_its_tokens_back(policy: Path) -> None:
    from transformers import AutoTokenizer

    prompt = make_load("even", in_flight=8, rollouts=8, size="tiny").prompts[0]
    assert AutoTokenizer.from_pretrained(policy)(text_of(prompt))["input_ids"] == prompt.tolist()


def test_a_slow_system_gets_whole_rounds_and_at_least_one_group() -> None:
    load = make_load("even", in_flight=16, rollouts=128, size="tiny")
    warm = Made(lengths=[128] * 16, seconds=10.0)
    assert len(affordable(load, warm, 1000.0).lengths) == 128
    assert len(affordable(load, warm, 30.0).lengths) == 48
    assert len(affordable(load, warm, 6.0).lengths) == 8
    assert len(affordable(load, warm, 0.1).lengths) == 8


def test_figures_of_rollouts_with_other_lengths_are_refused() -> None:
    load = make_load("even", in_flight=8, rollouts=8, size="tiny")
    check(Made(lengths=[128] * 8, seconds=1.0), load)
    with pytest.raises(RuntimeError, match="found 127 tokens for 128 in rollout 3"):
        check(Made(lengths=[128] * 3 + [127] + [128] * 4, seconds=1.0), load)


def test_the_ratio_is_of_turns_and_the_pace_is_the_median() -> None:
    mine = [Made(lengths=[10] * 8, seconds=s) for s in (1.0, 2.0, 4.0)]
    others = [Made(lengths=[10] * 8, seconds=s) for s in (2.0, 2.0, 2.0)]
    found = figures(mine, others)
    assert found["tokens_per_s"] == 40.0
    assert found["ratio"] == 1.0
    assert found["spread"] == pytest.approx((80 - 20) / 40)
    assert lost([95.0, 80.0, 99.0], [100.0, 100.0, 100.0]) == pytest.approx(5.0)


def test_every_row_has_the_promised_fields(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(
        "bench.generator.__main__.make_load", lambda *case, **how: short(make_load(*case, **how))
    )
    out = tmp_path / "rows.jsonl"
    assert not run_all(policy, options(), Report("generator", out)), out.read_text()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["system"] for row in rows] == ["ours", "hf_generate"]
    for row in rows:
        assert row.keys() >= ROW
        assert row["tokens_per_s"] > 0 and row["rollouts"] == 8
    assert rows[1]["ratio"] == 1.0


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
