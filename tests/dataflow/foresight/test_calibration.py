"""Constants that fit what runs took."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow.errors import GraphError
from dataflow.foresight.calibration import calibrate, described, read_constants, to_plain
from dataflow.foresight.catalogue import device_kind
from dataflow.foresight.counts import Counts, counts
from dataflow.foresight.generation import GeneratorReplica
from dataflow.foresight.least_squares import non_negative
from dataflow.foresight.lengths import Lengths
from dataflow.foresight.rates import ASSUMED_CONSTANTS, Rates
from dataflow.foresight.scenarios import exchanges_of
from dataflow.foresight.seen import ActivitySpan, Decoded, SeenRun
from dataflow.foresight.training import BACKWARD, Learners
from transport.weights.costs.decoder import Decoder

TRUE = Rates(step_s=2e-3, row_s=3e-5, end_s=1e-4, compute=0.2, memory=1e6, exchange_s=3e-4)
LEARNS = Rates(step_s=0.02, layer_s=3e-3, channel_s=5e-8, compute=0.1, memory=1e6, exchange_s=7e-4)
GROUP, PROMPTS, PROMPT = 8, 32, 7.0
SHAPES = (
    (2, 128, 8.0, 50.0, 32), (4, 256, 40.0, 100.0, 32), (3, 192, 15.0, 20.0, 8), (2, 256, 90.0, 64.0, 64),
    (6, 128, 25.0, 8.0, 16), (2, 512, 12.0, 30.0, 32),
)  # fmt: skip
"""Layers and width, mean tokens, rollouts at once, prompts of a step."""


def sized(layers: int, width: int) -> Counts:
    return counts(Decoder(
        layers=layers, width=width, inner=4 * width, heads=4, kv_heads=4, vocabulary=64, head_width=width // 4
    ))  # fmt: skip


def made_run(
    model: Counts,
    *,
    mean: float,
    batch: float,
    name: str,
    gpus: int = 0,
    prompts: int = PROMPTS,
    ranks: int = 1,
    threads: int = 1,
    true: Rates = TRUE,
    learns: Rates = LEARNS,
) -> SeenRun:
    """A run whose operators took exactly what these rates say."""
    cpu = device_kind("cpu")
    replica = GeneratorReplica(model=model, kind=cpu, dtype="float32", tensor_parallel=ranks)
    learners = Learners(model=model, kind=cpu, ranks=ranks, dtype="float32")
    rollouts, stretches = GROUP * prompts, []
    for number in range(1, 7):
        tokens = number * rollouts * mean
        steps = tokens / batch
        context = PROMPT + 0.6 * mean
        decode = replica.step(batch, context, true).seconds(true) * steps
        prefill = model.forward(number * prompts * PROMPT, PROMPT / 2) / (ranks * cpu.rate("float32") * true.compute)
        busy = decode + prefill + number * rollouts * true.end_s
        stretches.append(
            ActivitySpan(seconds=10.0, busy_s=busy, steps=steps, tokens=tokens, rows_in=0,
                    rows_out=number * rollouts)
        )  # fmt: skip
    each = 0.5 * (mean + PROMPT / GROUP)
    passes = learners.passes(rollouts, each, forward=1 + BACKWARD, sequences=1e9).seconds(learns)
    computed = 0.5 * (rollouts * mean + prompts * PROMPT)
    exchanges_s = exchanges_of(learners) * learns.exchange_s
    once_s = learners.update().seconds(learns) + learns.step_s + exchanges_s
    passes_s = passes + learners.channels(computed) * learns.channel_s + exchanges_s
    passes_s += model.layers * learns.layer_s
    step_s = passes_s + once_s
    trained = [
        ActivitySpan(seconds=10.0, busy_s=n * step_s, steps=n, tokens=0, rows_in=n * rollouts, rows_out=0)
        for n in range(5, 11)
    ]
    scored = [ActivitySpan(seconds=10.0, busy_s=0.5, steps=0, tokens=0, rows_in=1000, rows_out=1000)]
    line: dict[str, Any] = {
        "rollouts": rollouts, "groups": prompts, "completion_tokens_mean": mean, "staleness_mean": 0.0,
        "computed_tokens": computed, "seconds_forward_backward": passes_s,
        "seconds_optimizer": once_s / 4, "seconds_record": once_s / 2, "seconds_publish": once_s / 4,
    }  # fmt: skip
    return SeenRun(
        path=Path(name), generator="generator", trainer="trainer", model=model, max_staleness=0, group_size=GROUP,
        placed={
            node: {"ranks": ranks, "replicas": 1, "gpus": gpus, "threads": threads}
            for node in ("generator", "trainer", "reward")
        },
        prompts_per_step=prompts, prompt_tokens=PROMPT, lengths=Lengths.of([mean]),
        stretches={"generator": stretches, "trainer": trained, "reward": scored},
        steps=[{**line, "seconds": float(number)} for number in range(10)],
    )  # fmt: skip


def test_runs_of_several_sizes_give_back_the_constants_that_made_them() -> None:
    runs = [
        made_run(sized(layers, width), mean=mean, batch=batch, prompts=prompts, name=f"run-{layers}")
        for layers, width, mean, batch, prompts in SHAPES
    ]
    found = calibrate(runs)
    assert found.row_s == {"reward": pytest.approx(0.5e-3)}
    assert found.computed == pytest.approx(0.5)
    for name in ("step_s", "row_s", "end_s", "compute"):
        assert getattr(found.generator, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    for name in ("step_s", "layer_s", "channel_s", "compute"):
        assert getattr(found.learner, name) == pytest.approx(getattr(LEARNS, name), rel=0.1), name
    assert "calibrated on run-2, run-4" in found.source and "20.1% of matrix products" in described(found)


def test_a_run_whose_batch_empties_tells_the_seconds_of_a_step_from_those_of_a_rollout() -> None:
    model = sized(2, 128)
    replica, run = (
        GeneratorReplica(model=model, kind=device_kind("cpu"), dtype="float32"),
        made_run(sized(2, 128), mean=8.0, batch=50.0, name="a"),
    )

    def emptying(stretch: ActivitySpan) -> ActivitySpan:
        """With 400 more steps of 2, 20 and 200 rollouts each."""
        sizes = [
            Decoded(steps=400.0, rollouts=400.0 * batch,
                    seconds=400 * replica.step(batch, PROMPT + 0.6 * 8.0, TRUE).seconds(TRUE))
            for batch in (2, 20, 200)
        ]  # fmt: skip
        return replace(
            stretch, decoded=sizes, steps=stretch.steps + 1200, tokens=stretch.tokens + 400 * 222,
            busy_s=stretch.busy_s + sum(size.seconds for size in sizes),
        )  # fmt: skip

    emptied = replace(run, stretches=run.stretches | {"generator": list(map(emptying, run.stretches["generator"]))})
    found = calibrate([emptied]).generator
    for batch in (1, 8, 64, 256):
        told, true = (replica.step(batch, 12.0, rates).seconds(rates) for rates in (found, TRUE))
        assert told == pytest.approx(true, rel=0.02)
    blind = calibrate([run]).generator
    assert abs(replica.step(1, 12.0, blind).seconds(blind) / replica.step(1, 12.0, TRUE).seconds(TRUE) - 1) > 0.05


def test_what_ranks_take_to_wait_for_each_other_is_told_by_runs_that_have_some() -> None:
    shapes = ((2, 128, 8.0, 50.0, 32), (4, 256, 40.0, 100.0, 32), (3, 192, 15.0, 20.0, 8), (2, 512, 12.0, 30.0, 32))
    single, cut = (
        [
            made_run(sized(layers, width), mean=mean, batch=batch, prompts=prompts, name=f"{layers}", ranks=ranks)
            for layers, width, mean, batch, prompts in shapes
        ]
        for ranks in (1, 2)
    )
    found = calibrate([*single, *cut])
    assert found.generator.exchange_s == pytest.approx(TRUE.exchange_s, rel=0.05)
    assert found.learner.exchange_s == pytest.approx(LEARNS.exchange_s, rel=0.05)
    assert f"{1e6 * found.generator.exchange_s:.3g} us an exchange between ranks" in described(found)
    assert calibrate(single).generator.exchange_s == calibrate(single).learner.exchange_s == 150e-6


def test_processes_with_more_threads_have_constants_of_their_own() -> None:
    """Products are faster with them, and what is done once is not."""
    faster, learns = replace(TRUE, compute=0.4), replace(LEARNS, layer_s=9e-3, channel_s=4e-8, compute=0.15)

    def runs(**how: Any) -> list[SeenRun]:
        return [
            made_run(sized(layers, width), mean=mean, batch=batch, prompts=prompts, name=f"{layers}", **how)
            for layers, width, mean, batch, prompts in SHAPES
        ]

    found = calibrate([*runs(), *runs(ranks=2), *runs(threads=2, true=faster, learns=learns)])
    for role, slow, fast in (("generator", TRUE, faster), ("learner", LEARNS, learns)):
        one, two = found.of(role, 1), found.of(role, 2)  # type: ignore[arg-type]
        for got, true in ((one, slow), (two, fast), (getattr(found, role), slow)):
            assert (got.step_s, got.compute) == pytest.approx((true.step_s, true.compute), rel=0.05)
        assert two.exchange_s == one.exchange_s
    lines = [line.partition(":")[0] for line in described(found).splitlines()[:4]]
    assert lines == [f"{who} with {many}" for who in ("generator", "trainer") for many in ("1 thread", "2 threads")]
    assert calibrate(runs(threads=2, true=faster, learns=learns)).threaded == {}


def test_constants_go_into_a_file_and_come_back(tmp_path: Path) -> None:
    found = calibrate([made_run(sized(2, 128), mean=8.0, batch=50.0, name="a", threads=many) for many in (1, 2)])
    (tmp_path / "c.json").write_text(json.dumps(to_plain(found)))
    assert read_constants(str(tmp_path / "c.json")) == found != ASSUMED_CONSTANTS
    for text in ("{", "[]", '{"generator": {"speed": 1}}'):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(GraphError, match="no constants that `dataflow calibrate` wrote; found"):
            read_constants(str(tmp_path / "c.json"))


def test_runs_of_another_kind_of_device_and_no_runs_are_refused() -> None:
    run = made_run(sized(2, 128), mean=8.0, batch=50.0, name="a", gpus=1)
    with pytest.raises(GraphError, match="run 'a' computed on accelerators, but kind is 'cpu'; say which"):
        calibrate([run])
    with pytest.raises(GraphError, match="on cores, but kind is 'H100'"):
        calibrate([replace(run, placed={"generator": {"gpus": 0}})], "H100")
    with pytest.raises(GraphError, match="needs run folders"):
        calibrate([])


def test_runs_in_which_one_waits_for_the_other_tell_how_fast_a_process_is_alone() -> None:
    def spans(run: SeenRun, seconds: float, faster: float, **how: Any) -> SeenRun:
        """With nodes that are at work all the time, or hardly ever, and so many times as fast."""
        stretches = {
            node: [replace(each, seconds=seconds, busy_s=each.busy_s / faster) for each in some]
            for node, some in run.stretches.items()
        }
        steps = [
            {key: value / faster if key.startswith("seconds_") else value for key, value in line.items()}
            for line in run.steps
        ]
        return replace(run, stretches=stretches, steps=steps, **how)

    runs = [
        made_run(sized(layers, width), mean=mean, batch=batch, prompts=prompts, name=f"{layers}")
        for layers, width, mean, batch, prompts in SHAPES
    ]
    crowded = [spans(run, 1e-9, 1.0, max_staleness=4) for run in runs]
    found = calibrate([*crowded, *(spans(run, 1e9, 1.3) for run in runs)])
    assert found.alone == pytest.approx(1.3) and "1.30 times as fast while no other" in described(found)
    assert found.generator.step_s == pytest.approx(TRUE.step_s, rel=0.05)
    assert found.learner.channel_s == pytest.approx(LEARNS.channel_s, rel=0.1)
    assert calibrate(crowded).alone == 1.0, "runs of one kind do not tell"


@pytest.mark.parametrize(("rows", "columns"), [(12, 4), (40, 11)])
def test_no_answer_is_negative_and_none_is_nearer(rows: int, columns: int) -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        x, true = random.random((rows, columns)), np.maximum(0, random.normal(size=columns))
        y = x @ true + 0.1 * random.normal(size=rows)
        found, left = non_negative(x, y)
        assert (found >= 0).all() and left == pytest.approx(((x @ found - y) ** 2).sum())
        for _ in range(30):
            other = np.maximum(0, found + 0.1 * random.normal(size=columns))
            assert ((x @ other - y) ** 2).sum() >= left * (1 - 1e-6)
