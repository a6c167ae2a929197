"""Constants that fit what runs took."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from dataflow.errors import GraphError
from dataflow.foresight.calibration import calibrate, described, read_constants, to_plain
from dataflow.foresight.catalogue import device_kind
from dataflow.foresight.counts import Counts, counts
from dataflow.foresight.fitting import non_negative
from dataflow.foresight.generation import GeneratorReplica
from dataflow.foresight.lengths import Lengths
from dataflow.foresight.rates import ASSUMED_CONSTANTS, Constants, Rates
from dataflow.foresight.scenarios import exchanges_of, once_s
from dataflow.foresight.seen import ActivitySpan, Decoded, SeenRun
from dataflow.foresight.training import BACKWARD, LAST, Learners
from transport.weights.costs.decoder import Decoder

TRUE = Rates(
    step_s=5e-4,
    row_s=7e-6,
    end_s=4e-5,
    end_token_s=9e-6,
    compute=0.6,
    memory=2.5,
    exchange_s=3e-3,
    look_s=9e-10,
    wait_s=2e-4,
)


LEARNS = Rates(
    step_s=0.012,
    layer_s=3e-3,
    channel_s=2.5e-7,
    compute=0.5,
    memory=0.6,
    exchange_s=4e-3,
    look_s=7e-10,
    wait_s=5e-4,
)


TRUTH = Constants(
    generator=TRUE, learner=LEARNS, alone=1.25, parallel={"generator": 0.7, "learner": 0.7}
)


GROUP, PROMPTS, PROMPT = 8, 32, 7.0


SHAPES = (
    (2, 128, 8.0, 50.0, 32),
    (4, 256, 40.0, 100.0, 32),
    (3, 192, 15.0, 20.0, 8),
    (2, 256, 90.0, 64.0, 64),
    (6, 128, 25.0, 8.0, 16),
    (2, 512, 12.0, 30.0, 32),
)


"""Layers and width, mean tokens, rollouts at once, prompts of a step."""


CPU = device_kind("cpu")


def sized(layers: int, width: int) -> Counts:
    return counts(
        Decoder(
            layers=layers,
            width=width,
            inner=4 * width,
            heads=4,
            kv_heads=4,
            vocabulary=64,
            head_width=width // 4,
        )
    )


def decode_s(
    model: Counts,
    rollouts: float,
    context: float,
    true: Constants,
    ranks: int = 1,
    threads: int = 1,
) -> float:
    """Of a decode step, where all cores are at work."""
    replica = GeneratorReplica(model=model, kind=CPU, dtype="float32", tensor_parallel=ranks)
    rates = true.of("generator", threads)
    return replica.step(rollouts, context, rates).seconds(rates)


def trained_s(
    model: Counts,
    rollouts: float,
    tokens: float,
    back: float,
    true: Constants,
    ranks: int = 1,
    threads: int = 1,
) -> tuple[float, float]:
    """Of a step's passes over so many tokens, and of what it does once."""
    learners, rates = (
        Learners(model=model, kind=CPU, ranks=ranks, dtype="float32"),
        true.of("learner", threads),
    )
    passes = learners.passes(
        rollouts, tokens / rollouts, forward=1 + BACKWARD, sequences=1e9
    ).seconds(rates)
    passes += (
        learners.channels(tokens) * rates.channel_s + learners.looks(tokens, back) * rates.look_s
    )
    each = exchanges_of(learners) * rates.exchange_s
    layers = model.layers * (rates.layer_s + rates.wait_s)
    return passes + layers + each, once_s(learners, rates, 1) - layers - each


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
    true: Constants = TRUTH,
    idle: float = 0.0,
    sizes: tuple[int, ...] = (2, 20, 200),
    lengths: Lengths | None = None,
) -> SeenRun:
    """A run whose operators took exactly what these constants say. idle: share of the time in which
    each had no other beside it; sizes: of batches in decode steps that began nothing.
    """
    rollouts, stretches = GROUP * prompts, list[ActivitySpan]()
    faster = 1 + (true.alone - 1) * idle if ranks * threads == 1 else 1.0
    in_turn = threads > 1 or idle == 1
    share = 0.4 if in_turn else 1 - idle
    lengths = lengths or Lengths.of([mean])
    rates, context = true.of("generator", threads), PROMPT + lengths.looks_back
    contexts = {  # in turn all of a batch begin at once: those that are left have come as far
        size: (
            PROMPT + float(np.quantile(lengths.tokens, max(0.0, 1 - size / rollouts)))
            if in_turn
            else context
        )
        for size in sizes
    }
    for number in range(1, 7):
        tokens = number * rollouts * mean
        steps = tokens / batch
        prefill = model.forward(number * prompts * PROMPT, PROMPT / 2) / (
            ranks * CPU.rate("float32") * rates.compute
        )
        busy = decode_s(model, batch, context, true, ranks, threads) * steps
        busy += prefill + number * rollouts * (rates.end_s + mean * rates.end_token_s)
        decoded = [
            Decoded(
                steps=40.0,
                rollouts=40.0 * size,
                looked=40 * size * contexts[size],
                seconds=40 * decode_s(model, size, contexts[size], true, ranks, threads) / faster,
            )
            for size in sizes
        ]
        busy = busy / faster + sum(size.seconds for size in decoded)
        stretches.append(
            ActivitySpan(
                seconds=busy / share,
                busy_s=busy,
                steps=steps + sum(size.steps for size in decoded),
                tokens=tokens + sum(size.rollouts for size in decoded),
                looked=tokens * context + sum(size.looked for size in decoded),
                rows_in=0,
                rows_out=number * rollouts,
                decoded=decoded,
            )
        )
    computed = 0.5 * (rollouts * (mean - LAST) + prompts * PROMPT)
    passes_s, once = (
        each / faster
        for each in trained_s(model, rollouts, computed, context, true, ranks, threads)
    )
    trained = [
        ActivitySpan(
            seconds=n * (passes_s + once) / share,
            busy_s=n * (passes_s + once),
            steps=n,
            tokens=0,
            rows_in=n * rollouts,
            rows_out=0,
        )
        for n in range(5, 11)
    ]
    scored = [scored_span(0.75, seconds=2000.0)]
    line: dict[str, Any] = {
        "rollouts": rollouts,
        "groups": prompts,
        "completion_tokens_mean": mean,
        "staleness_mean": 0.0,
        "computed_tokens": computed,
        "seconds_forward_backward": passes_s,
        "seconds_optimizer": once / 4,
        "seconds_record": once / 2,
        "seconds_publish": once / 4,
    }
    return SeenRun(
        path=Path(name),
        generator="generator",
        trainer="trainer",
        model=model,
        group_size=GROUP,
        max_staleness=0 if in_turn else 4,
        cores=2 * ranks,
        placed={
            node: {"ranks": ranks, "replicas": 1, "gpus": gpus, "threads": threads}
            for node in ("generator", "trainer", "reward")
        },
        prompts_per_step=prompts,
        prompt_tokens=PROMPT,
        lengths=lengths,
        stretches={"generator": stretches, "trainer": trained, "reward": scored},
        steps=[{**line, "seconds": number * (passes_s + once) / share} for number in range(10)],
    )


def scored_span(busy_s: float, seconds: float = 10.0, rows: int = 1000) -> ActivitySpan:
    return ActivitySpan(
        seconds=seconds, busy_s=busy_s, steps=0, tokens=0, rows_in=rows, rows_out=rows
    )


def made_runs(
    shapes: tuple[tuple[int, int, float, float, int], ...] = SHAPES, **how: Any
) -> list[SeenRun]:
    return [
        made_run(
            sized(layers, width),
            mean=mean,
            batch=batch,
            prompts=prompts,
            name=f"run-{layers}",
            **how,
        )
        for layers, width, mean, batch, prompts in shapes
    ]


def test_runs_of_several_sizes_give_back_the_constants_that_made_them() -> None:
    found = calibrate(made_runs())
    assert found.row_s == {"reward": pytest.approx(0.5e-3)}, (
        "of 0.75, as generator and trainer had the two cores"
    )
    assert found.computed == pytest.approx(0.5)
    for name in ("step_s", "row_s", "compute"):
        assert getattr(found.generator, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name
    ended = [rates.end_s + 30 * rates.end_token_s for rates in (found.generator, TRUE)]
    assert ended[0] == pytest.approx(ended[1], rel=0.1)
    for name in ("step_s", "layer_s", "channel_s", "compute"):
        assert getattr(found.learner, name) == pytest.approx(getattr(LEARNS, name), rel=0.25), name
    for layers, width, back in ((3, 96, 20.0), (5, 320, 60.0), (2, 128, 200.0)):
        model = sized(layers, width)
        told, came = (decode_s(model, 100, back, each) for each in (found, TRUTH))
        assert told == pytest.approx(came, rel=0.03)
        told, came = (sum(trained_s(model, 256, 5000.0, back, each)) for each in (found, TRUTH))
        assert told == pytest.approx(came, rel=0.05)
    assert "calibrated on run-2, run-4" in found.source and "% of matrix products" in described(
        found
    )


def test_a_run_whose_batch_empties_tells_the_seconds_of_a_step_from_those_of_a_rollout() -> None:
    model, true = sized(2, 128), replace(TRUTH, generator=replace(TRUE, step_s=2e-3))
    emptied, blind = (
        calibrate([made_run(model, mean=8.0, batch=50.0, name="a", sizes=sizes, true=true)])
        for sizes in ((2, 20, 200), ())
    )
    for batch in (1, 8, 64, 256):
        assert decode_s(model, batch, 11.0, emptied) == pytest.approx(
            decode_s(model, batch, 11.0, true), rel=0.05
        )
    assert abs(decode_s(model, 1, 11.0, blind) / decode_s(model, 1, 11.0, true) - 1) > 0.3


def test_where_all_of_a_batch_begin_at_once_those_that_are_left_say_how_far_they_look_back() -> (
    None
):
    """In turn with its trainer, a batch of 256 whose lengths are even up to 200 has two left after
    198 tokens.
    """
    model, true = sized(2, 64), replace(TRUTH, generator=replace(TRUE, look_s=1.5e-9))
    run = made_run(
        model,
        mean=100.5,
        batch=128.0,
        name="a",
        threads=2,
        true=true,
        sizes=(2, 16, 64, 128, 192, 240),
        lengths=Lengths.of(range(1, 201)),
    )
    found = calibrate([run])
    for size, tokens in ((16, 187), (64, 150), (192, 50)):
        told, truth = (
            decode_s(model, size, PROMPT + tokens, each, threads=2) for each in (found, true)
        )
        assert told == pytest.approx(truth, rel=0.07)


def test_seconds_of_a_process_that_shared_its_core_are_those_that_it_computed_in() -> None:
    """A scorer that computes half of the time beside the other two leaves them 5/6 of two cores: so
    much longer their seconds are, and no constant is another one.
    """
    run = made_run(sized(2, 128), mean=30.0, batch=50.0, name="a")
    slower = 6 / 5
    stretches = {
        node: [
            replace(
                each,
                busy_s=slower * each.busy_s,
                seconds=slower * each.seconds,
                decoded=[replace(size, seconds=slower * size.seconds) for size in each.decoded],
            )
            for each in some
        ]
        for node, some in run.stretches.items()
    }
    spent = (
        "seconds",
        "seconds_forward_backward",
        "seconds_optimizer",
        "seconds_record",
        "seconds_publish",
    )
    steps = [{**line, **{name: slower * line[name] for name in spent}} for line in run.steps]
    crowded = replace(
        run, steps=steps, stretches={**stretches, "reward": [scored_span(1000.0, seconds=2000.0)]}
    )
    found, true = calibrate([crowded]), calibrate([run])
    for role in ("generator", "learner"):
        for name in (
            "step_s",
            "row_s",
            "end_s",
            "layer_s",
            "channel_s",
            "compute",
            "memory",
            "look_s",
        ):
            got, wanted = (getattr(getattr(each, role), name) for each in (found, true))
            assert got == pytest.approx(wanted, rel=1e-3), (role, name)
    assert found.row_s["reward"] == pytest.approx(2 / 3)


def test_where_a_run_does_not_say_what_attention_looked_at_it_is_what_it_is_in_the_mean() -> None:
    run = made_run(sized(2, 128), mean=30.0, batch=50.0, name="a", sizes=(20, 200))
    spans = [
        replace(span, looked=0.0, decoded=[replace(size, looked=0.0) for size in span.decoded])
        for span in run.stretches["generator"]
    ]
    found = calibrate([replace(run, stretches={**run.stretches, "generator": spans})]).generator
    for name, value in vars(calibrate([run]).generator).items():
        assert getattr(found, name) == (
            value if isinstance(value, str) else pytest.approx(value)
        ), name


def test_what_ranks_take_to_wait_for_each_other_is_told_by_runs_that_have_some() -> None:
    shapes = (
        (2, 128, 8.0, 50.0, 32),
        (4, 256, 40.0, 100.0, 32),
        (3, 192, 15.0, 20.0, 8),
        (2, 512, 12.0, 30.0, 32),
    )
    single, cut = made_runs(shapes), made_runs(shapes, ranks=2)
    found = calibrate([*single, *cut])
    assert found.generator.exchange_s == pytest.approx(TRUE.exchange_s, rel=0.05)
    assert found.learner.exchange_s == pytest.approx(LEARNS.exchange_s, rel=0.05)
    assert f"{1e6 * found.generator.exchange_s:.3g} us an exchange between ranks" in described(
        found
    )
    untold = calibrate(single)  # it is what is assumed, on so slow a machine
    assert untold.generator.exchange_s == pytest.approx(TRUE.exchange_s, rel=0.3)
    assert untold.learner.exchange_s == pytest.approx(LEARNS.exchange_s, rel=0.3)


def test_processes_with_more_threads_share_out_products_and_wait_for_each_other() -> None:
    """What is done once is as fast as by one that is alone."""
    found = calibrate([*made_runs(), *made_runs(ranks=2), *made_runs(threads=2)])
    assert found.alone == pytest.approx(TRUTH.alone, abs=0.15), (
        "nearly as assumed: threads alone hardly tell"
    )
    assert found.parallel == pytest.approx(TRUTH.parallel, abs=0.1)
    roles: tuple[Literal["generator", "learner"], ...] = ("generator", "learner")
    for role in roles:
        for threads in (1, 2):
            got, true = found.of(role, threads), TRUTH.of(role, threads)
            assert (got.step_s, got.compute) == pytest.approx(
                (true.step_s, true.compute), rel=0.12
            ), (role, threads)
            assert got.exchange_s == pytest.approx(true.exchange_s, rel=0.2)
    assert described(found).count("times as fast in what they share out") == 2
    assert calibrate(made_runs()).parallel == {}, "no run tells"


def test_a_synchronous_run_and_another_show_what_others_take_with_one_thread_and_several() -> None:
    """Their models are smaller and larger than the others; a process alone and two threads are as
    is assumed, about.
    """
    true = replace(TRUTH, alone=1.2, parallel={"generator": 0.7, "learner": 0.6})
    tiny, large = (
        made_run(
            sized(layers, width),
            mean=30.0,
            batch=100.0,
            prompts=prompts,
            name=f"{layers}",
            true=true,
            **how,
        )
        for layers, width, prompts, how in (
            (2, 64, 24, {"threads": 2, "sizes": (1, 8, 64, 180)}),
            (4, 256, 16, {"idle": 0.3}),
        )
    )
    found = calibrate([tiny, large])
    for layers, width in ((2, 128), (4, 128), (4, 256), (2, 64)):
        model = sized(layers, width)
        for threads in (1, 2):
            for batch in (1, 40, 250):
                told, came = (
                    decode_s(model, batch, 40.0, each, threads=threads) for each in (found, true)
                )
                assert told == pytest.approx(came, rel=0.2), (layers, width, threads, batch)
            for tokens in (2000.0, 8000.0):
                told, came = (
                    sum(trained_s(model, 256, tokens, 40.0, each, threads=threads))
                    for each in (found, true)
                )
                assert told == pytest.approx(came, rel=0.2), (layers, width, threads, tokens)


def test_time_between_two_steps_in_which_nobody_works_is_the_way_between_operators() -> None:
    def run(generator_s: float, trainer_s: float, **how: Any) -> SeenRun:
        """With steps of a second."""
        made = made_run(sized(2, 128), mean=8.0, batch=50.0, name="a", threads=2)
        busy = {"generator": generator_s, "trainer": trainer_s, "reward": 0.01}
        stretches = {
            node: [replace(each, seconds=10.0, busy_s=10 * busy[node]) for each in some]
            for node, some in made.stretches.items()
        }
        steps = [{**line, "seconds": float(number)} for number, line in enumerate(made.steps)]
        return replace(made, stretches=stretches, steps=steps, **how)

    # to the reward, and to the trainer
    assert calibrate([run(0.6, 0.37)]).hop_s == pytest.approx(0.03 / 2)
    assert calibrate([run(0.6, 0.5)]).hop_s == 0.0
    assert calibrate([run(0.6, 0.37, max_staleness=1)]).hop_s == ASSUMED_CONSTANTS.hop_s


def test_constants_go_into_a_file_and_come_back(tmp_path: Path) -> None:
    found = calibrate(
        [made_run(sized(2, 128), mean=8.0, batch=50.0, name="a", threads=many) for many in (1, 2)]
    )
    (tmp_path / "c.json").write_text(json.dumps(to_plain(found)))
    assert read_constants(str(tmp_path / "c.json")) == found != ASSUMED_CONSTANTS
    for text in ("{", "[]", '{"generator": {"speed": 1}}'):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(GraphError, match="no constants that `dataflow calibrate` wrote; found"):
            read_constants(str(tmp_path / "c.json"))


def test_a_scorers_processes_take_as_long_a_row_as_a_call_and_bound_a_run_by_themselves() -> None:
    """32 calls of 50 ms at once are 640 rows in a second; rows that came, and wait, are not
    counted.
    """
    run = made_run(sized(2, 128), mean=8.0, batch=50.0, name="a", idle=0.4)
    pooled = ActivitySpan(
        seconds=10.0, busy_s=9.8, beside_s=9.6, steps=0, tokens=0, rows_in=4000, rows_out=6144
    )
    light = ActivitySpan(seconds=10.0, busy_s=0.5, steps=0, tokens=0, rows_in=6144, rows_out=6144)
    run = replace(
        run,
        stretches={**run.stretches, "reward": [pooled], "advantage": [light]},
        calls_at_once={"reward": 32},
        scorers={"reward", "advantage"},
        placed={
            **run.placed,
            **{node: {"worker": "reward", "replicas": 1} for node in ("reward", "advantage")},
        },
    )
    found = calibrate([run])
    # a third slower beside both, faster beside none
    beside = 1 - 0.6 * 0.6 / 3 + 0.4 * 0.4 * (found.alone - 1)
    assert found.row_s == {
        "reward": pytest.approx(0.05, rel=0.01),
        "advantage": pytest.approx(beside * 0.5 / 6144),
    }
    assert run.efficiency == pytest.approx(0.98)


def test_steps_that_were_counted_at_the_ends_of_a_stretch_change_nothing() -> None:
    """Its seconds at work are those of whole steps or not; how many ended in it is off by one."""
    run = made_run(sized(2, 128), mean=8.0, batch=50.0, name="a")
    fewer = [replace(each, steps=each.steps - 1) for each in run.stretches["trainer"]]
    odd = replace(run, stretches={**run.stretches, "trainer": fewer})
    assert calibrate([odd]).learner == calibrate([run]).learner


def test_what_is_passed_on_and_read_costs_by_its_tokens_where_lengths_differ() -> None:
    """20 microseconds a row and 3 a token; of runs of one length all is the row's."""

    def run(mean: float) -> SeenRun:
        made, seconds = (
            made_run(sized(2, 128), mean=mean, batch=50.0, name="a"),
            1000 * (20e-6 + 3e-6 * mean),
        )
        scored = scored_span(1.5 * seconds, seconds=2000.0)  # three compute on two cores
        return replace(made, stretches={**made.stretches, "reward": [scored]})

    found = calibrate([run(8.0), run(50.0)])
    assert (found.row_s, found.row_token_s) == (
        {"reward": pytest.approx(20e-6)},
        {"reward": pytest.approx(3e-6)},
    )
    assert "reward: 20 us a row, 3 us a token" in described(found)
    idle = [scored_span(0.0)]
    unseen = replace(run(8.0), stretches={**run(8.0).stretches, "reward": idle})
    assert 0 <= calibrate([unseen, run(50.0)]).row_token_s["reward"] <= (20e-6 + 150e-6) / 50
    nothing = replace(run(50.0), stretches={**run(50.0).stretches, "reward": idle})
    assert calibrate([unseen, nothing]).row_s == {"reward": 0.0}
    alike = calibrate([run(8.0), run(10.0)])
    assert (alike.row_s, alike.row_token_s) == ({"reward": pytest.approx(47e-6)}, {})


def test_runs_of_another_kind_of_device_and_no_runs_are_refused() -> None:
    run = made_run(sized(2, 128), mean=8.0, batch=50.0, name="a", gpus=1)
    with pytest.raises(
        GraphError, match="run 'a' computed on accelerators, but kind is 'cpu'; say which"
    ):
        calibrate([run])
    with pytest.raises(GraphError, match="on cores, but kind is 'H100'"):
        calibrate([replace(run, placed={"generator": {"gpus": 0}})], "H100")
    with pytest.raises(GraphError, match="needs run folders"):
        calibrate([])


def test_runs_in_which_one_waits_for_the_other_tell_how_fast_a_process_is_alone() -> None:
    found = calibrate([*made_runs(), *made_runs(idle=1.0)])
    assert found.alone == pytest.approx(1.25) and "1.25 times as fast while no other" in described(
        found
    )
    assert found.generator.step_s == pytest.approx(TRUE.step_s, rel=0.05)
    assert found.learner.channel_s == pytest.approx(LEARNS.channel_s, rel=0.15)
    assert calibrate(made_runs()).alone == pytest.approx(1.1), "runs of one kind do not tell"
    accelerated = [
        replace(run, placed={node: {**of, "gpus": 1} for node, of in run.placed.items()})
        for run in made_runs()
    ]
    assert calibrate(accelerated, "H100").alone == 1.0


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


def test_a_run_says_how_much_slower_its_machine_was_in_one_third_of_it_than_in_another() -> None:
    run = made_run(sized(2, 128), mean=8.0, batch=50.0, name="a")
    ends = np.cumsum([0.2] * 10 + [0.35] * 10 + [0.25] * 10)
    assert replace(run, steps=[{"seconds": float(end)} for end in ends]).drift == pytest.approx(
        0.35 / 0.2, rel=0.12
    )
    assert run.drift == pytest.approx(1.0)
