"""What a graph takes on devices that nobody has rented."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from made_models import LLAMA_8B, made_model, reward, wired
from made_tables import put, write_flat

from dataflow import Devices, Graph, GraphError, LoRA, Model, main, scorer
from dataflow.foresight.calibration import read_constants
from dataflow.foresight.choice.candidates import candidates
from dataflow.foresight.choice.search import choose, ways
from dataflow.foresight.command import read_devices
from dataflow.foresight.counts import size_of
from dataflow.foresight.foresee import Foreseen, foresee
from dataflow.foresight.kernel_tables import _read
from dataflow.foresight.lengths import mean_staleness
from dataflow.foresight.report import lines
from dataflow.foresight.workload import Workload, read_workload
from operators import Generator, Logprobs, Prompts, Trainer, episode
from operators.credit import advantage
from operators.losses import aipo

EIGHT_AND_EIGHT = {"generator": 8, "trainer": 8}


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return made_model(tmp_path / "llama-8b", LLAMA_8B)


def graph(
    model: Model,
    max_staleness: int = 2,
    *,
    reference: bool = False,
    prompts: int = 64,
    **knobs: Any,
) -> Graph:
    generator = Generator(model, group_size=16, max_tokens=2048, **knobs)
    trainer = Trainer(
        model, loss=aipo, prompts_per_step=prompts, lr=1e-6, gradient_checkpointing=True
    )
    between = Logprobs(model.frozen()) if reference else lambda rollouts: rollouts
    return wired("foreseen", generator, trainer, max_staleness, between)


def test_an_asynchronous_step_is_as_long_as_the_busiest_and_a_synchronous_one_as_all_together(
    model: Model,
) -> None:
    room = read_devices("16xH100")
    apart, in_turn = (
        foresee(graph(model, bound), room, gpus=EIGHT_AND_EIGHT, simulated=False)
        for bound in (2, 0)
    )
    busy = {each.node: each.seconds for each in apart.operations}
    assert apart.step_s == max(busy.values()) and apart.idle(apart.bottleneck) == 0
    assert (
        0 < min(apart.idle(each) for each in apart.operations if each is not apart.bottleneck) < 1
    )
    assert (
        in_turn.step_s
        == sum(each.seconds for each in in_turn.operations) + in_turn.weights_s
        > apart.step_s
    )
    assert apart.rollouts == 1024 and 0 < apart.staleness <= 2 and in_turn.staleness == 0


def test_a_simulated_step_is_bound_by_its_busiest_operator_and_meets_closed_forms_without_tails(
    model: Model,
) -> None:
    room, even = read_devices("16xH100"), Workload(mean_tokens=512, sigma=0.0)
    for bound in (0, 2):
        closed, found = (
            foresee(graph(model, bound), room, gpus=EIGHT_AND_EIGHT, workload=even, simulated=each)
            for each in (False, True)
        )
        assert found.step_s >= found.bottleneck.seconds * 0.999
        assert found.step_s == pytest.approx(closed.step_s, rel=0.15) and found.overlaps == (
            bound > 0
        )
        assert (
            sum(found.by_staleness.values()) == pytest.approx(1)
            and max(found.by_staleness) <= bound
        )
    tails = foresee(graph(model), room, gpus=EIGHT_AND_EIGHT, workload=replace(even, sigma=1.2))
    assert tails.step_s > found.step_s and tails.spread_s[1] > tails.spread_s[0]


def test_a_simulated_trainer_passes_over_the_tokens_of_closed_forms_also_in_short_rollouts(
    model: Model,
) -> None:
    """Of three tokens the last, which nothing follows, is a third."""
    room, short = read_devices("16xH100"), Workload(mean_tokens=3, prompt_tokens=8, sigma=0.0)
    closed, found = (
        foresee(graph(model, 0), room, gpus=EIGHT_AND_EIGHT, workload=short, simulated=each)
        for each in (False, True)
    )
    seconds = [
        next(each.seconds for each in some.operations if each.node == "trainer")
        for some in (closed, found)
    ]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.02)


@scorer(isolate=False)
def short(completion: str) -> float:
    return 1.0


@scorer(isolate=False)
def plain(short: float) -> float:
    return short


@scorer(concurrency=16)
def judged(plain: float) -> float:
    return plain


def test_a_step_is_bound_by_all_of_one_worker_or_by_the_processes_of_one_node(
    model: Model,
) -> None:
    generator = Generator(model, group_size=16, max_tokens=2048)
    trainer = Trainer(model, loss=aipo, prompts_per_step=64, lr=1e-6, gradient_checkpointing=True)
    made = wired("judged", generator, trainer, 0, lambda rollouts: judged(plain(short(rollouts))))
    room = read_devices("16xH100")
    longest_s = max(
        each.seconds
        for each in foresee(made, room, gpus=EIGHT_AND_EIGHT, simulated=False).operations
    )
    for light, pooled, bounds in ((0.7, 0.5, ("short", "plain")), (0.3, 1.5, ("judged",))):
        row_s = dict.fromkeys(("short", "plain"), light * longest_s / 1024)
        row_s["judged"] = pooled * longest_s * 16 / 1024
        for simulated in (True, False):
            found = foresee(
                made,
                room,
                gpus=EIGHT_AND_EIGHT,
                workload=Workload(row_s=row_s),
                simulated=simulated,
                steps=6,
            )
            busy = {each.node: each.seconds for each in found.operations}
            assert busy["judged"] == pytest.approx(pooled * longest_s)
            assert found.efficiency == pytest.approx(
                sum(busy[name] for name in bounds) / found.step_s
            )
            assert found.efficiency < 1.0


def test_a_step_with_twice_the_devices_takes_no_longer_and_costs_no_fewer_hours(
    model: Model,
) -> None:
    few, many = (
        foresee(
            graph(model),
            read_devices(f"{2 * n}xH100"),
            gpus={"generator": n, "trainer": n},
            steps=100,
        )
        for n in (8, 16)
    )
    assert few.step_s / 2 <= many.step_s * 1.0001 <= few.step_s and few.gpu_hours and many.gpu_hours
    assert few.gpu_hours <= many.gpu_hours * 1.0001 and few.gpu_hours == pytest.approx(
        100 * 16 * few.step_s / 3600
    )


def test_no_way_to_deal_devices_out_is_shorter_than_the_one_that_is_chosen(model: Model) -> None:
    made, room = graph(model, reference=True, tensor_parallel=2), read_devices("24xH100")
    choice = choose(made, room, steps=8, knobs=False)
    best, ways_there = choice.ways, candidates(made, room, knobs=False)
    assert [way.foreseen.step_s for way in best] == sorted(way.foreseen.step_s for way in best)
    assert sum(best[0].gpus.values()) == 24 and best[0].gpus["generator"] % 2 == 0
    assert set(best[0].gpus) == set(ways_there[0].gpus)
    tried = []
    for gpus in [each.gpus for each in ways_there]:
        try:
            tried.append(foresee(made, room, gpus=gpus, steps=8).step_s)
        except GraphError as error:
            assert "does not fit" in str(error) or "in a row on one host" in str(error)
    assert len(tried) > 2 and best[0].foreseen.step_s == min(tried)
    assert best[1].flags in ways(
        choice
    ) and f"{best[1].foreseen.step_s / min(tried) - 1:+.0%}" in ways(choice)


def test_cores_are_foreseen_too_and_two_processes_share_one(model: Model) -> None:
    short = Workload(prompt_tokens=4, mean_tokens=4)
    two, one = (
        foresee(graph(model), Devices(cpus=cpus), workload=short, steps=3) for cpus in (2, 1)
    )
    assert two.gpu_hours is None and two.step_s < one.step_s < 2.1 * two.step_s
    assert [each.devices for each in two.operations] == ["1 x cpu", "1 x cpu"]


def test_unlike_devices_each_take_their_own_time_and_the_trainer_has_the_faster_ones(
    model: Model,
) -> None:
    even = Workload(mean_tokens=256, sigma=0.0)
    made, how = graph(model, 4), {"workload": even, "steps": 12}
    both = foresee(
        made, read_devices("16xH100+8xL40S"), gpus={"generator": 16, "trainer": 8}, **how
    )
    few = foresee(made, read_devices("16xH100"), gpus={"generator": 8, "trainer": 8}, **how)
    makes, trains = both.operations
    assert makes.devices == "8 x H100 + 8 x L40S" and trains.devices == "8 x H100"
    assert (
        makes.room_bytes == 48e9 and trains.room_bytes == 80e9 and both.step_s <= few.step_s * 1.02
    )
    closed = [
        foresee(made, read_devices(text), gpus=gpus, **how, simulated=False).operations[0].seconds
        for text, gpus in (
            ("16xH100+8xL40S", {"generator": 16, "trainer": 8}),
            ("16xH100", {"generator": 8, "trainer": 8}),
            ("8xH100+8xL40S", {"generator": 8, "trainer": 8}),
        )
    ]
    assert 1 / closed[0] == pytest.approx(1 / closed[1] + 1 / closed[2], rel=0.2)


def test_a_scorer_takes_what_it_is_said_to_take_and_a_filter_asks_for_more_prompts(
    model: Model,
) -> None:
    room, even = read_devices("16xH100"), Workload(mean_tokens=64, sigma=0.0)
    plain, slow, dropping = (
        foresee(graph(model), room, gpus=EIGHT_AND_EIGHT, workload=replace(even, **more))
        for more in ({}, {"row_s": {"reward": 0.05}}, {"drops": {"advantage": 0.5}})
    )
    assert "no time for reward, advantage" in lines(plain) and "no time for advantage" in lines(
        slow
    )
    assert slow.bottleneck.node == "reward" and slow.step_s == pytest.approx(0.05 * 1024, rel=0.02)
    makes = [each.operations[0].seconds for each in (plain, dropping)]
    assert makes[1] / makes[0] == pytest.approx(2.0, rel=0.15)
    with pytest.raises(
        GraphError, match="a workload tells of 'rewards', which graph 'foreseen' does not have"
    ):
        foresee(graph(model), room, gpus=EIGHT_AND_EIGHT, workload=Workload(row_s={"rewards": 1.0}))


def test_rollouts_that_are_decoded_at_once_are_no_more_than_may_be_on_their_way(
    model: Model,
) -> None:
    found = foresee(graph(model, 1), read_devices("72xH100"), gpus={"generator": 64, "trainer": 8})
    generator = next(each for each in found.operations if each.node == "generator")
    assert generator.at_once == pytest.approx(2 * 1024)


def test_the_command_prints_what_is_foreseen_and_starts_nothing(
    model: Model,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)

    def build() -> Graph:
        return graph(model)

    main(build, args=["--foresee", "16xH100", "--steps", "8", "--workload", "mean=512,prompt=100"])
    said = capsys.readouterr().out
    for words in (
        "operator ",
        "x H100",
        "GiB of 74.5 GiB",
        "a step of 1,024 rollouts takes",
        "is busy longest",
        "GPU hours",
        "- prompts of 100 tokens\n- completions of 512 tokens",
        "not fitted to any run",
        "--gpus generator=",
    ):
        assert words in said, words
    assert not (tmp_path / "runs").exists()
    main(build, args=["--foresee", "16xH100", "--steps", "8", "--gpus", "generator=8,trainer=8"])
    assert "ways to deal" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["16xH10"], "a kind of device that nobody knows; found 'H10'; did you mean H100"),
        (["lots"], "cannot be read at 'lots'; write them as 16xH100"),
        (["4xH100+4xH100"], "names H100 twice"),
        (["2xH100"], "the plan does not fit"),
        (["16xH100", "--gpus", "shared"], "which take turns, needs 16 GPUs of"),
        (["16xH100", "--gpus", "generator=16"], "'trainer' and 'generator' need devices"),
        (["16xH100", "--workload", "mean=many"], "cannot be read at 'mean=many'"),
        (["16xH100", "--workload", "mean=-1"], "cannot be; give 0 or more"),
        (["16xH100", "--workload", "reward.drops=1"], "give a share below 1"),
        (["2xcpu+4xH100"], "either accelerators or cores"),
        (["2xcpu", "--constants", "none.json"], "no constants that `dataflow calibrate` wrote"),
        (
            ["16xH100", "--workload", "mean=5000"],
            "5,000 tokens in the mean, but have 2,048 at most",
        ),
    ],
)
def test_what_cannot_be_foreseen_is_refused(
    model: Model, capsys: pytest.CaptureFixture[str], args: list[str], why: str
) -> None:
    def build() -> Graph:
        return graph(model)

    with pytest.raises(SystemExit):
        main(build, args=["--foresee", *args])
    assert why in " ".join(capsys.readouterr().err.split())


def test_a_model_whose_config_is_not_at_hand_is_refused(tmp_path: Path, model: Model) -> None:
    (Path(model.source) / "config.json").unlink()
    with pytest.raises(
        GraphError, match=r"dimensions of model '.*' are not at hand: FileNotFoundError"
    ):
        foresee(graph(model), read_devices("16xH100"), gpus=EIGHT_AND_EIGHT)


def test_an_operator_with_a_model_and_no_devices_is_not_left_out_silently(model: Model) -> None:
    with pytest.raises(
        GraphError, match=r"'ref_logprobs' computes with a model and has no devices here"
    ):
        foresee(graph(model, reference=True), read_devices("16xH100"), gpus=EIGHT_AND_EIGHT)


def test_forms_of_which_no_cost_is_known_are_refused_and_fp8_takes_half_the_memory(
    model: Model,
) -> None:
    room = read_devices("16xH100")
    needs = []
    for weights in ("model", "fp8"):
        made = foresee(
            graph(model, weights=weights, cache_bytes=1 << 30), room, gpus=EIGHT_AND_EIGHT
        ).operations[0]
        needs.append((made.need_bytes or 0) - (1 << 30))
    assert 0.5 < needs[1] / needs[0] < 0.6
    with pytest.raises(GraphError, match="'generator' has int8, of which no cost is known"):
        foresee(graph(model, weights="int8_dynamic"), room, gpus=EIGHT_AND_EIGHT)


def test_adapters_take_a_product_less_and_little_memory(model: Model) -> None:
    """Weights that are not trained have no gradient: two products in place of three, but for what
    is computed again.
    """
    room, sizes = read_devices("16xH100"), []
    for lora in (None, LoRA(rank=8), LoRA(rank=256)):
        made = graph(replace(model, lora=lora))
        sizes.append(foresee(made, room, gpus=EIGHT_AND_EIGHT, simulated=False).operations[1])
    whole, small, wide = sizes
    assert (
        0.7 < small.seconds / whole.seconds < 0.78 and small.seconds < wide.seconds < whole.seconds
    )
    assert (small.need_bytes or 0) < (wide.need_bytes or 0) < (whole.need_bytes or 0)


def test_ways_to_cut_a_model_that_no_run_has_are_foreseen_on_request_and_said_to_be_supposed(
    model: Model,
) -> None:
    room, how = (
        read_devices("32xH100"),
        {"gpus": {"generator": 16, "trainer": 16}, "simulated": False},
    )

    def cut(text: str) -> Foreseen:
        return foresee(graph(model), room, workload=read_workload(f"mean=256,{text}"), **how)

    plain, piped, context, both = (
        cut(text)
        for text in (
            "",
            "trainer.pipeline=4",
            "trainer.context=2,trainer.pipeline=2",
            "generator.pipeline=4",
        )
    )
    makes, trains = (
        {each.node: each.seconds for each in made.operations} for made in (plain, piped)
    )
    turns = 1024 / (16 / 4)
    assert trains["generator"] == makes["generator"]
    assert trains["trainer"] / makes["trainer"] == pytest.approx((turns + 3) / turns, rel=1e-3)
    assert "'trainer' cut over 4 ranks by pipeline, which this engine does not run" in lines(piped)
    assert "2 ranks by context and 2 ranks by pipeline" in lines(context)
    assert both.operations[0].cut == "4 x 4 ranks" and plain.operations[0].cut == "16 x 1 rank"
    assert (
        foresee(
            graph(model), room, workload=read_workload("generator.pipeline=4"), gpus=how["gpus"]
        ).step_s
        > 0
    )
    for text, why in (
        (
            "trainer.pipeline=3",
            "'trainer' has 16 ranks, which cannot be cut 1 ways by tensors, 3 by pipeline",
        ),
        ("generator.pipeline=5", "16 replicas here, which make no pipelines of 5"),
        (
            "generator.context=2",
            "'generator' is supposed to be cut by context, of which no cost is known; of it pipe",
        ),
        (
            "reward.pipeline=2",
            "'reward' is supposed to be cut by pipeline, of which no cost is known; of it nothing",
        ),
        ("trainer.pipeline=0", "cannot be; give 1 or more"),
        ("trainer.pipeline=1.5", "cannot be read at"),
        ("trainers.pipeline=2", "a workload tells of 'trainers'"),
    ):
        with pytest.raises(GraphError, match=why):
            cut(text)


def test_lengths_that_are_given_count(model: Model) -> None:
    room = read_devices("16xH100")
    short, long = (
        foresee(graph(model), room, gpus=EIGHT_AND_EIGHT, workload=Workload(mean_tokens=mean))
        for mean in (256, 1024)
    )
    assert 2 < long.step_s / short.step_s < 5 and "1,024 tokens in the mean" in lines(long)


@pytest.mark.parametrize(
    ("in_flight", "batch", "ratio", "tail", "measured"),
    [(120, 240, 0.63, 1.42, 1.26), (240, 120, 0.92, 1.43, 3.59), (128, 128, 1.07, 1.44, 3.09)],
)
def test_staleness_is_within_0_3_versions_of_runs_that_were_published(
    in_flight: float, batch: float, ratio: float, tail: float, measured: float
) -> None:
    """Applied Compute, 2026-07."""
    found = mean_staleness(in_flight=in_flight, batch=batch, ratio=ratio, tail=tail)
    assert found == pytest.approx(measured, abs=0.3)


def test_a_generator_is_foreseen_by_measured_kernels_and_the_output_names_them(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, busy, package = read_devices("16xH100"), [], put(tmp_path, monkeypatch)
    for times in (1.0, 3.0):
        _read.cache_clear()
        write_flat(package, times)
        found = foresee(
            graph(model),
            room,
            gpus=EIGHT_AND_EIGHT,
            constants=read_constants("kernels"),
            simulated=False,
        )
        busy.append({each.node: each.seconds for each in found.operations})
    assert (
        busy[0]["trainer"] == busy[1]["trainer"]
        and 2 < busy[1]["generator"] / busy[0]["generator"] < 3
    )
    assert "- 'generator' by kernels measured on H100 by aiconfigurator-core" in lines(found)
    known = read_constants("kernels:0.24.0")
    named = foresee(graph(model), room, gpus=EIGHT_AND_EIGHT, constants=known, simulated=False)
    assert named.operations == found.operations
    alike = foresee(graph(model), room, gpus=EIGHT_AND_EIGHT, constants=known, steps=8)
    assert alike.step_s > 0 and "kernels measured on H100" in lines(alike)
    with pytest.raises(GraphError, match=r"H100 has no measured .* of vLLM 0.9.0; found 0.24.0"):
        foresee(graph(model), room, gpus=EIGHT_AND_EIGHT, constants=read_constants("kernels:0.9.0"))
    with pytest.raises(GraphError, match="L40S has no measured"):
        choose(
            graph(model),
            read_devices("64xL40S"),
            constants=read_constants("kernels"),
            knobs=False,
        )


def test_a_generator_is_foreseen_by_measured_servers_and_other_names_are_refused(
    model: Model,
) -> None:
    room = read_devices("16xH20")
    sheets, serving = (
        foresee(
            graph(model),
            room,
            gpus=EIGHT_AND_EIGHT,
            constants=read_constants(each),
            simulated=False,
        )
        for each in ("data-sheets", "serving")
    )
    busy = [{each.node: each.seconds for each in found.operations} for found in (sheets, serving)]
    assert busy[0]["trainer"] == busy[1]["trainer"] and busy[0]["generator"] != busy[1]["generator"]
    assert (
        "seven constants fitted to measured runs of vLLM on H100, H200, B200; extrapolated to H20"
        in lines(serving)
    )
    with pytest.raises(
        GraphError, match="'guess' has no constants .* or take one of data-sheets, serving"
    ):
        read_constants("guess")
    with pytest.raises(GraphError, match="constants to foresee with are 'serving:1'; take one of"):
        choose(graph(model), room, constants=read_constants("serving:1"), knobs=False)


@episode
async def talk(chat: Any) -> float:
    await chat.say()
    return 1.0


def talks(model: Model, max_staleness: int = 2, *, prompts: int = 64) -> Graph:
    """As `graph`, in turns."""
    generator = Generator(model, group_size=16, max_tokens=512, context_tokens=4096)
    trainer = Trainer(
        model, loss=aipo, prompts_per_step=prompts, lr=1e-6, gradient_checkpointing=True
    )
    g = Graph("talks")
    rows = Prompts(str(Path(model.source).parent / "prompts.jsonl"))
    trainer(advantage(reward(talk(generator, g.source(rows)))))
    g.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return g


def test_an_episode_is_foreseen_with_its_turns_and_the_seconds_of_its_world(model: Model) -> None:
    room = read_devices("16xH100")
    whole = foresee(
        graph(model, 0, prompts=16),
        room,
        gpus=EIGHT_AND_EIGHT,
        workload=Workload(mean_tokens=512, sigma=0.0),
    )
    steps = {}
    for turns, world_s in ((1, 60.0), (4, 0.0), (4, 60.0)):
        texts = Workload(
            mean_tokens=512, sigma=0.0, turns={"talk": turns}, world_s={"talk": world_s}
        )
        found = [
            foresee(
                talks(model, 0, prompts=16),
                room,
                gpus=EIGHT_AND_EIGHT,
                workload=texts,
                simulated=each,
            )
            for each in (True, False)
        ]
        assert found[0].step_s == pytest.approx(found[1].step_s, rel=0.15)
        assert any(f"in {turns} turns" in each for each in found[0].assumed)
        steps[turns, world_s] = found[0].step_s
    assert steps[1, 60.0] == pytest.approx(whole.step_s, rel=0.02) == steps[4, 0.0]
    assert steps[4, 60.0] == pytest.approx(whole.step_s + 3 * 60, rel=0.05)


def test_an_episode_of_which_nobody_says_how_many_turns_it_has_is_refused(model: Model) -> None:
    room = read_devices("16xH100")
    with pytest.raises(
        GraphError,
        match=r"'talk' is an episode, and nobody knows.*give --workload talk.turns=4,talk.world",
    ):
        foresee(talks(model), room, gpus=EIGHT_AND_EIGHT)
    with pytest.raises(GraphError, match="tells of turns of 'reward', which is no episode"):
        foresee(talks(model), room, gpus=EIGHT_AND_EIGHT, workload=read_workload("reward.turns=2"))
    with pytest.raises(GraphError, match="give 1 or more"):
        read_workload("talk.turns=0")


def test_adapters_of_a_mixture_are_counted_as_they_are_made(tmp_path: Path) -> None:
    """At its attention alone: its experts are no linear modules."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=101,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
    )
    config.save_pretrained(tmp_path / "mixture")
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(
        4 * 8 * sum(layer.weight.shape)
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and not name.endswith(("gate", "lm_head"))
    )
    size = size_of(str(tmp_path / "mixture"))
    assert size.parts("bfloat16", trains=True, lora=LoRA(rank=8))["adapters"] == expected
