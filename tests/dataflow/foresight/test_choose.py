"""Which way is chosen, and what is told of the others."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from made_models import made_model, wired

from dataflow import Devices, Graph, GraphError, Model, main
from dataflow.foresight.choice.candidates import (
    Candidate,
    candidates,
    deals_out,
    generators,
    splits,
)
from dataflow.foresight.choice.gains import Gain, changes, gains, staler, told
from dataflow.foresight.choice.search import (
    ALIKE,
    LacksMemory,
    Objective,
    choose,
    cost_of,
    ranked,
    reason,
    ways,
)
from dataflow.foresight.command import read_devices, read_prices
from dataflow.foresight.foresee import BRIEF_STEPS, SIMULATED_STEPS, foresee
from dataflow.foresight.simulation.clock import Clock, Processors
from dataflow.foresight.workload import Workload
from operators import Generator, Trainer
from operators.losses import aipo

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


SHORT = Workload(prompt_tokens=20, mean_tokens=40)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return made_model(tmp_path / "tiny", TINY)


def graph(model: Model, max_staleness: int = 1, **knobs: Any) -> Graph:
    generator = Generator(model, group_size=4, max_tokens=128, **knobs)
    return wired(
        "chosen", generator, Trainer(model, loss=aipo, prompts_per_step=8, lr=1e-6), max_staleness
    )


def test_a_generator_is_tried_with_ranks_that_divide_its_heads_and_fp8_where_devices_have_it(
    model: Model,
) -> None:
    generator = graph(model).operators["generator"]
    widths = [{"tensor_parallel": each} for each in (2, 4, 8)]
    assert generators(generator, read_devices("8xA100")) == [{}, *widths]
    ways = generators(generator, read_devices("4xH100"))
    assert ways == [{}, *widths[:2], *({**way, "weights": "fp8"} for way in ({}, *widths[:2]))]
    assert generators(generator, read_devices("4xH100+4xA100"))[-1] == {"tensor_parallel": 4}
    wide = replace(generator, tensor_parallel=2, weights="fp8")  # type: ignore[call-arg]
    assert generators(wide, read_devices("2xH100")) == [{}, {"tensor_parallel": 1}]
    assert not deals_out(12, 8, 3) and deals_out(12, 2, 4) and not deals_out(8, 3, 2)


@pytest.mark.parametrize(
    ("free", "unit", "trainer"), [*itertools.product((2, 9, 16, 100, 1024), (1, 2, 8), (1, 4))]
)
def test_splits_are_whole_replicas_and_whole_copies_and_not_too_many(
    free: int, unit: int, trainer: int
) -> None:
    found = splits(free, unit, trainer, 64)
    assert len(found) <= 64 and all(0 < each < free and each % unit == 0 for each in found)
    assert all((free - each) % trainer == 0 for each in found)


@pytest.mark.slow
def test_candidates_are_a_thousand_at_most_and_leave_devices_unused_where_they_may(
    model: Model,
) -> None:
    made = graph(model)
    for devices in ("16xH100", "1024xH100", "512xH100+512xL40S"):
        room = read_devices(devices)
        for idle in (False, True):
            found = candidates(made, room, idle=idle)
            assert len(found) <= 1100 and len({repr(each) for each in found}) == len(found)
            assert all(1 <= sum(each.gpus.values()) <= room.gpus for each in found)
            assert any(sum(each.gpus.values()) < each.on(room).gpus for each in found) == idle
    kinds = {each.kinds for each in found}
    assert kinds == {(), ("H100",), ("L40S",)}
    assert (
        Candidate(kinds=("L40S",), gpus={"generator": 1})
        .flags(made, room)
        .startswith("--foresee 512xL40S --gpus")
    )


def test_on_cores_replicas_ranks_and_ranks_of_a_replica_are_tried(model: Model) -> None:
    found = candidates(graph(model), Devices(cpus=2))
    tried = {
        (each.replicas["generator"], each.ranks["trainer"], each.knobs.get("tensor_parallel", 1))
        for each in found
    }
    assert tried == set(itertools.product((1, 2), (1, 2), (1, 2))) and len(found) == 8
    asked = found[-1].flags(graph(model), Devices(cpus=2))
    assert asked == "--replicas generator=2 --ranks trainer=2 Generator(tensor_parallel=2)"


def test_the_chosen_way_is_the_shortest_of_those_simulated_and_the_graph_stays_as_it_is(
    model: Model,
) -> None:
    made, room = graph(model), read_devices("4xH100")
    operators = dict(made.operators)
    choice = choose(made, room, workload=SHORT, steps=6)
    steps = [way.foreseen.step_s for way in choice.ways]
    assert (
        steps == sorted(steps)
        and choice.tried == len(candidates(made, room))
        and made.operators == operators
    )
    for way in choice.ways[:3]:
        again = foresee(way.candidate.placed(made), room, gpus=way.gpus, workload=SHORT, steps=6)
        assert again.step_s == way.foreseen.step_s
    assert any(way.candidate.knobs for way in choice.ways)
    assert f"{choice.tried} ways looked at, {choice.simulated} simulated" in ways(choice)


def test_whoever_leads_was_simulated_at_length_and_the_others_may_be_told_of_briefly(
    model: Model,
) -> None:
    choice = choose(
        graph(model, 2),
        read_devices("8xH100"),
        workload=Workload(prompt_tokens=200, mean_tokens=60),
    )
    lengths = [
        len(way.foreseen.simulated.step_ends)
        for way in choice.ways
        if way.foreseen.simulated is not None
    ]
    assert lengths[0] == SIMULATED_STEPS and set(lengths) == {SIMULATED_STEPS, BRIEF_STEPS}


def test_a_way_that_is_far_off_by_closed_forms_is_not_simulated(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, room, counts = graph(model), read_devices("4xH100"), []
    for far in (float("inf"), 1e-9):
        monkeypatch.setattr("dataflow.foresight.choice.search.FAR", far)
        choice = choose(made, room, workload=SHORT, steps=6)
        counts.append((choice.simulated, choice.ways[0].foreseen.step_s))
    (all_of, best), (few, first) = counts
    assert few < all_of and best <= first


def test_the_least_cost_takes_fewer_devices_than_the_shortest_step_and_prices_turn_it(
    model: Model,
) -> None:
    made, room = graph(model), read_devices("8xH100")
    fast = choose(made, room, workload=SHORT, steps=6).ways[0].foreseen
    choice = choose(made, room, workload=SHORT, steps=6, objective=Objective(cost=True))
    cheap = choice.ways[0].foreseen
    assert cost_of(cheap) < cost_of(fast) and cheap.taken["H100"] < fast.taken["H100"] == 8
    assert [cost_of(way.foreseen) for way in choice.ways] == sorted(
        cost_of(way.foreseen) for way in choice.ways
    )
    both = read_devices("2xH100+2xL40S")
    for dear, other in (("H100", "L40S"), ("L40S", "H100")):
        prices = {dear: 1000.0, other: 0.01}
        won = choose(
            made, both, workload=SHORT, steps=6, objective=Objective(cost=True, prices=prices)
        ).ways[0]
        assert set(won.foreseen.taken) == {other} and won.candidate.kinds == (other,)
        assert cost_of(won.foreseen, prices) == pytest.approx(
            won.foreseen.step_s / 3600 * 0.01 * won.foreseen.taken[other]
        )


def test_ways_that_are_refused_are_counted_by_reason(model: Model, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.mkdir()
    (large / "config.json").write_text(
        json.dumps({**TINY, "hidden_size": 8192, "num_hidden_layers": 40})
    )
    (large.parent / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    choice = choose(
        graph(Model(str(large), dtype="bfloat16")), read_devices("8xH100"), workload=SHORT, steps=4
    )
    assert choice.refused["do not fit into memory"] > 0 and "do not fit into memory" in ways(choice)
    assert sum(choice.refused.values()) < choice.tried
    refused = choose(graph(model, engine="vllm"), read_devices("4xH100"), workload=SHORT, steps=4)
    assert any("runs on vLLM, which does not serve" in why for why in refused.refused)
    assert all(
        set(knobs) == {"tensor_parallel"} if name == "generator" else True
        for way in refused.ways
        for name, knobs in way.candidate.knobs.items()
    ), [way.candidate.knobs for way in refused.ways]
    with pytest.raises(GraphError, match="vLLM.*|keeps its memory for as long as it runs"):
        choose(graph(model, engine="vllm"), read_devices("1xH100"), workload=SHORT)
    row = (
        "'trainer' needs 8 GPUs of {} in a row on one host, but 'a' has 4 of 8 GPUs of 74.5 GiB"
        " free"
    )
    assert (
        reason(row.format("100.2 GiB"))
        == "do not fit into memory"
        != reason(row.format("900.0 MiB"))
    )
    assert reason("'a' is given 3 GPUs; x") == reason("'b' is given 4 GPUs; y")


@pytest.mark.slow
def test_ways_of_which_no_device_could_hold_a_rank_are_passed_over_and_what_is_chosen_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over random models of which some ways fit, and devices."""
    random, passed_over = Random(0), 0
    for number in range(6):
        heads = random.choice([16, 32])
        config = {
            **TINY,
            "hidden_size": 128 * heads,
            "intermediate_size": 512 * heads,
            "num_attention_heads": heads,
            "num_hidden_layers": random.choice([24, 48, 96]),
        }
        made = graph(
            made_model(tmp_path / f"model-{number}", config), max_staleness=random.choice([0, 2])
        )
        room = read_devices(random.choice(["8xH100", "16xL40S", "4xH100+4xL40S", "16xA100"]))
        objective = Objective(cost=random.random() < 0.5)
        calls = list[bool]()

        def counted(
            self: LacksMemory,
            *way: Any,
            asks: Any = LacksMemory.__call__,
            calls: list[bool] = calls,
        ) -> bool:
            calls.append(asks(self, *way))
            return calls[-1]

        found = list[Any]()
        for asked in (counted, lambda self, *way: False):
            monkeypatch.setattr(LacksMemory, "__call__", asked)
            try:
                choice = choose(made, room, workload=SHORT, steps=4, objective=objective)
            except GraphError as error:
                found.append(str(error))
            else:
                told = [(way.flags, way.foreseen.step_s) for way in choice.ways]
                found.append((told, choice.tried, choice.simulated, choice.refused))
        assert found[0] == found[1]
        passed_over += sum(calls)
    assert passed_over > 10


def test_what_would_help_most_is_simulated_around_a_way(model: Model) -> None:
    made, room = graph(model, max_staleness=0), read_devices("4xH100")
    now = Candidate(gpus={"generator": 2, "trainer": 2})
    texts = {each.text for each in changes(made, now, room)}
    assert {
        "staleness 1 instead of 0",
        "weights='fp8' of 'generator'",
        "tensor_parallel=2 of 'generator'",
        "slots=512 of 'generator'",
        "one more replica of the generator (1 more)",
        "a trainer of twice the devices (2 more)",
    } == texts
    found = gains(made, now, room, workload=SHORT, steps=6)
    assert [each.share for each in found] == sorted((each.share for each in found), reverse=True)
    saved = {each.text: each.share for each in found}["staleness 1 instead of 0"]
    before, after = (
        foresee(each, room, gpus=now.gpus, workload=SHORT, steps=6).step_s
        for each in (made, staler(made, made.operators["generator"], 1))  # type: ignore[arg-type]
    )
    assert (
        saved == pytest.approx(1 - after / before)
        and saved > 0.1
        and made.feedbacks[0].max_staleness == 0
    )
    assert told(found).startswith(
        f"what would help most (seconds of a step): {found[0].text}: {-found[0].share:+.0%}"
    )
    assert told([]) == "no single change that is at hand saves 1% of a step" and told(
        [Gain(text="a", share=0.5)]
    ).endswith(": a: -50%")


def test_ranks_of_a_trainer_on_cores_each_take_one(model: Model) -> None:
    ended: dict[str, float] = {}
    clock = Clock(Processors(cores=2))
    clock.after(1.0, lambda: ended.update(trainer=clock.now), shared=2)
    clock.after(1.0, lambda: ended.update(generator=clock.now), shared=1)
    while clock.next():
        pass
    assert ended["trainer"] == ended["generator"] == pytest.approx(1.5)


def test_the_command_chooses_and_says_what_would_help(
    model: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def build() -> Graph:
        return graph(model)

    how = ["--foresee", "4xH100", "--steps", "4", "--workload", "mean=40,prompt=20"]
    main(build, args=[*how, "--gpus", "auto", "--draw", str(tmp_path / "found.json")])
    said = capsys.readouterr().out
    for text in (
        "chosen for the shortest step: --gpus generator=",
        "device seconds",
        "Generator(",
        "ways looked at",
    ):
        assert text in said, text
    plain = json.loads((tmp_path / "found.json").read_text())
    assert (
        plain["ways"][0]["step_s"] == plain["step_s"]
        and f"shortest step: {plain['ways'][0]['asked']}\n" in said
    )
    assert (
        all(each["text"] in said for each in plain["would_help"][:2]) and plain["ways_tried"] == 14
    )
    main(build, args=[*how, "--gpus", "auto:cost", "--prices", "H100=2.5"])
    said = capsys.readouterr().out
    for text in (
        "chosen for the least cost: --gpus generator=1,trainer=generator",
        "a step costs",
        "all steps",
        "H100=2.5 an",
    ):
        assert text in said, text
    main(
        build,
        args=[
            "--foresee",
            "2xcpu",
            "--steps",
            "3",
            "--workload",
            "mean=4,prompt=4",
            "--gpus",
            "auto",
        ],
    )
    assert "--replicas generator=" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--gpus", "auto"], "--gpus auto comes without --foresee"),
        (["--prices", "H100=2"], "--prices H100=2 comes without --foresee"),
        (["--foresee", "4xH100", "--gpus", "auto:time"], "cannot be read at 'auto:time'"),
        (["--foresee", "2xcpu", "--gpus", "auto:cost"], "cores of one machine cost the same"),
        (
            ["--foresee", "2xcpu", "--gpus", "auto", "--ranks", "trainer=2"],
            "they are given for ['trainer']",
        ),
        (["--foresee", "2xcpu", "--prices", "cpu=1"], "nobody rents by the hour"),
        (["--foresee", "4xH100", "--prices", "H100"], "cannot be read at 'H100'"),
        (["--foresee", "4xH100", "--prices", "H10=1"], "did you mean H100"),
        (["--foresee", "4xH100+4xL40S", "--prices", "H100=1"], "has none for L40S; add L40S=.."),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    model: Model, capsys: pytest.CaptureFixture[str], args: list[str], why: str
) -> None:
    def build() -> Graph:
        return graph(model)

    with pytest.raises(SystemExit):
        main(build, args=args)
    assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_search_on_a_thousand_devices_looks_at_hundreds_of_ways(model: Model) -> None:
    dims = {
        "num_hidden_layers": 126,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
    }
    (Path(model.source) / "config.json").write_text(
        json.dumps({**TINY, **dims, "num_key_value_heads": 8})
    )
    made = graph(model)
    trainer: Any = made.operators["trainer"]
    made = made.swap("trainer", replace(trainer, gradient_checkpointing=True))
    choice = choose(made, read_devices("1024xH100"), workload=Workload(mean_tokens=60))
    assert choice.tried >= 500
    best = choice.ways[0]
    assert best.candidate.knobs["tensor_parallel"] == 8 and sum(best.gpus.values()) == 1024
    assert choice.refused["do not fit into memory"] > 100


def test_prices_are_of_the_kinds_that_are_there() -> None:
    assert read_prices(" ", read_devices("4xH100")) is None
    assert read_prices("H100=2.5, L40S=1", read_devices("4xH100+4xL40S")) == {
        "H100": 2.5,
        "L40S": 1.0,
    }


def test_of_ways_on_cores_that_are_as_good_the_one_with_the_fewest_processes_leads(
    model: Model,
) -> None:
    """With a scorer that is slower than all else, more processes gain nothing, and get in each
    other's way.
    """
    made = choose(graph(model), Devices(cpus=2), workload=SHORT, steps=6).ways
    many, few = max(made, key=lambda way: way.processes), min(made, key=lambda way: way.processes)
    assert many.processes > few.processes

    def led(slower: float, alike: float) -> bool:
        """Whether the one with few processes leads, where it is slower by so much."""
        others = [
            replace(way, foreseen=replace(way.foreseen, step_s=step_s))
            for way, step_s in ((many, 1.0), (few, 1.0 + slower))
        ]
        return ranked(others, Objective(), alike)[0].processes == few.processes

    assert led(0.01, ALIKE) and not led(0.03, ALIKE) and not led(0.01, 0.0)
