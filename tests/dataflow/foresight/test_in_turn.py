"""Generator and trainer that take turns on the same devices, foreseen; and what would make a plan
fit.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_models import made_model, wired

from dataflow import Devices, Graph, GraphError, LoRA, Model, main
from dataflow.foresight.choice.search import choose
from dataflow.foresight.choice.ways_out import FLAGS, plan_or_advise, ways_out
from dataflow.foresight.command import read_devices, told
from dataflow.foresight.foresee import foresee
from dataflow.foresight.workload import Workload
from dataflow.planning.model_size import measure_models
from operators import Generator, Logprobs, Trainer
from operators.losses import aipo

QWEN = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}


EVEN = Workload(prompt_tokens=100, mean_tokens=256, sigma=0.0)


SHARED: dict[str, int | str] = {"generator": 1, "trainer": "generator"}


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return made_model(tmp_path / "qwen2.5-0.5b", QWEN)


def graph(model: Model, max_staleness: int = 1, *, reference: bool = False, **knobs: Any) -> Graph:
    generator = Generator(model, group_size=8, max_tokens=1024, slots=512)
    settled = {"micro_batch_tokens": 8192, "gradient_checkpointing": False, "compile": False}
    knobs = {**settled, **knobs}
    trainer = Trainer(model, loss=aipo, prompts_per_step=64, lr=1e-6, **knobs)
    between = Logprobs(model.frozen()) if reference else lambda rollouts: rollouts
    return wired("in_turn", generator, trainer, max_staleness, between)


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_step_in_turns_is_the_sum_of_those_who_share_and_the_way_of_their_memory(
    model: Model, ahead: int
) -> None:
    closed, found = (
        foresee(
            graph(model, ahead), read_devices("1xH100"), gpus=SHARED, workload=EVEN, simulated=each
        )
        for each in (False, True)
    )
    busy = sum(each.seconds for each in closed.operations)
    assert closed.step_s > busy and closed.step_s == pytest.approx(
        busy + closed.moved_s + closed.weights_s, rel=0.1
    )
    assert found.step_s == pytest.approx(closed.step_s, rel=0.15)
    assert found.step_s > sum(each.seconds for each in found.operations)
    assert found.staleness == pytest.approx(ahead / 2, abs=0.35) and not found.overlaps
    assert found.taken == {"H100": 1}, "devices that are shared count once"


def test_of_those_who_take_turns_never_two_are_at_work(model: Model) -> None:
    made, gpus = graph(model, 2, reference=True), {**SHARED, "ref_logprobs": "generator"}
    found = foresee(made, read_devices("1xH100"), gpus=gpus, workload=EVEN, steps=12).simulated
    assert found is not None and set(found.spans) >= {"generator", "trainer", "ref_logprobs"}
    spans = sorted(
        span for name in ("generator", "trainer", "ref_logprobs") for span in found.spans[name]
    )
    assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(spans))


def test_a_slower_way_to_main_memory_makes_turns_longer_and_adapters_make_them_shorter(
    model: Model,
) -> None:
    moved = {
        name: foresee(
            graph(each), read_devices(f"1x{name}"), gpus=SHARED, workload=EVEN, simulated=False
        ).moved_s
        for name, each in (
            ("H100", model),
            ("A100", model),
            ("H200", replace(model, lora=LoRA(16))),
        )
    }
    assert moved["A100"] == pytest.approx(2 * moved["H100"]) and moved["H200"] < moved["H100"] / 2


def test_on_one_device_turns_are_found_and_on_several_they_are_one_way_of_many(
    model: Model,
) -> None:
    (way,) = choose(graph(model), read_devices("1xRTX4090"), workload=EVEN, steps=6).ways[:1]
    assert way.gpus == SHARED and way.flags.startswith("--gpus generator=1,trainer=generator")
    many = choose(graph(model), read_devices("2xH100"), workload=EVEN, steps=6, knobs=False).ways
    assert {repr(dict(each.gpus)) for each in many} == {
        "{'generator': 1, 'trainer': 1}",
        "{'generator': 2, 'trainer': 'generator'}",
    }


def test_what_is_told_of_one_device_says_whence_it_is_and_where_memory_goes(model: Model) -> None:
    said = told(graph(model), "1xrtx_4090", gpus=None, workload="mean=100,prompt=50", steps=4)
    for words in (
        "1 x RTX4090",
        "each rank of 'trainer' needs at least",
        "gradients 1.8 GiB",
        "take turns on the same devices",
        "in turns of 2 steps",
        "foreseen, not measured; assumed:\n- ",
        "step: --gpus generator=1,trainer=generator",
    ):
        assert words in said, words


@pytest.mark.parametrize(
    ("knobs", "changed"),
    [
        ({"dtype": "float32"}, "gradient_checkpointing"),
        (
            {"dtype": "bfloat16", "gradient_checkpointing": True, "micro_batch_tokens": 1 << 18},
            "micro_batch_tokens",
        ),
    ],
)
def test_what_is_said_to_make_it_fit_makes_it_fit(
    model: Model, knobs: dict[str, Any], changed: str
) -> None:
    made = graph(replace(model, dtype=knobs.pop("dtype")), **knobs)
    room = read_devices("1xRTX4090")
    with pytest.raises(GraphError, match=rf"{changed}=\w+ of 'trainer' would make it fit$"):
        told(made, "1xRTX4090", gpus=None, workload="", steps=4)
    found = ways_out(made, lambda each: bool(foresee(each, room, gpus=SHARED, simulated=False)))
    assert found is not None and found[0].knob == changed
    for change in found:
        made = change.apply(made)
    assert foresee(made, room, gpus=SHARED, simulated=False)


def test_knobs_that_make_it_fit_only_together_are_named_together_by_their_flags(
    model: Model,
) -> None:
    made, room = graph(model), Devices(cpus=8, gpus=1, gpu_memory_bytes=6 << 30)
    token = FLAGS.set(frozenset({"gradient_checkpointing", "micro_batch_tokens", "lora"}))
    try:
        with pytest.raises(
            GraphError,
            match=r"\); --gradient-checkpointing and --lora would make it fit$",
        ):
            plan_or_advise(made, room, gpus=SHARED, sizes=measure_models(made))
        tiny = replace(room, gpu_memory_bytes=1 << 30)
        with pytest.raises(GraphError, match="no knob that was tried makes it fit"):
            plan_or_advise(made, tiny, gpus=SHARED, sizes=measure_models(made))
    finally:
        FLAGS.reset(token)


def test_a_plan_is_explained_for_gpus_that_are_not_here_by_a_config_alone(
    model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> Graph:
        return graph(model)

    for args, words in (
        (
            ["--gpus", "generator=1,trainer=1"],
            ("2 GPUs of no kind", "as --foresee 2xH100", "gpu 0", "gpu 1"),
        ),
        (
            ["--gpus", "8xh100"],
            ("the plan on 8xh100", "its config alone", "chosen: --gpus generator="),
        ),
        (
            ["--foresee", "1xA100", "--gpus", "generator=1,trainer=generator"],
            ("take turns on", "1xA100"),
        ),
    ):
        main(build, args=["--explain", *args])
        said = capsys.readouterr().out
        for each in (
            *words,
            "foreseen: the plan on",
            "each process of 'trainer' needs at least",
            "KV-cache",
        ):
            assert each in said, each


def test_an_id_is_foreseen_by_the_hubs_cache_and_refused_in_a_sentence_where_nothing_has_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cached(name: str, file: str, **rest: Any) -> str | None:
        return str(Path(model.source) / file) if name == "qwen/half" else None

    def unreached(*given: Any, **rest: Any) -> None:
        raise ConnectionError("no network")

    folder = Path(model.source).parent
    (folder / "qwen").mkdir()
    (folder / "qwen" / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreached)
    half, other = (
        graph(replace(model, source=name, name="")) for name in ("qwen/half", "qwen/other")
    )
    assert "take turns" in told(half, "1xH100", gpus=None, workload="mean=100", steps=4)
    with pytest.raises(
        GraphError,
        match="no folder qwen/other here, and the hub gives .*no network.*put its config",
    ):
        told(other, "1xH100", gpus=None, workload="", steps=4)


def test_devices_are_no_wish_of_a_run(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> Graph:
        return graph(model)

    with pytest.raises(SystemExit):
        main(build, args=["--gpus", "8xH100"])
    assert "--foresee 8xH100" in capsys.readouterr().err.replace("\n", " ")
