"""Devices of two kinds: which operator has how many of each, and how a trainer's ranks share its
model out.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_models import LLAMA_8B, made_model, wired

from dataflow import Graph, GraphError, Model, main, plan
from dataflow.foresight.catalogue import device_kind
from dataflow.foresight.choice.candidates import (
    Candidate,
    LearnerStep,
    best_learner,
    candidates,
    learners,
    seats,
)
from dataflow.foresight.choice.gains import changes
from dataflow.foresight.choice.search import choose, foreseen_of
from dataflow.foresight.command import read_devices
from dataflow.foresight.counts import counts_of
from dataflow.foresight.foresee import foresee
from dataflow.foresight.rates import ASSUMED
from dataflow.foresight.training import Learners, exchanged_s, waits_s
from dataflow.foresight.workload import Workload
from operators import Generator, Trainer
from operators.losses import aipo

LLAMA_405B = LLAMA_8B | {
    "num_hidden_layers": 126,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
}


EVEN = Workload(mean_tokens=640, prompt_tokens=100, sigma=0.3)


FAST, SLOW = (tuple(f"{kind}-{number}" for number in range(8)) for kind in ("H100", "L40S"))


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return made_model(tmp_path / "llama", LLAMA_8B)


def graph(model: Model, max_staleness: int = 8, prompts: int = 512, **knobs: Any) -> Graph:
    generator = Generator(model, group_size=8, max_tokens=960, **({"weights": "fp8"} | knobs))
    trainer = Trainer(
        model, loss=aipo, prompts_per_step=prompts, lr=1e-6, gradient_checkpointing=True
    )
    return wired("unlike", generator, trainer, max_staleness)


def by_hand() -> list[dict[str, tuple[str, ...]]]:
    """One kind trains and the other generates; each operator has half of each."""
    return [
        {"trainer": FAST, "generator": SLOW},
        {"trainer": SLOW, "generator": FAST},
        {"trainer": FAST[:4] + SLOW[:4], "generator": FAST[4:] + SLOW[4:]},
    ]


def test_a_trainer_is_tried_on_each_kind_and_the_plan_puts_it_there(model: Model) -> None:
    made, room = graph(model), read_devices("64xH100+64xL40S")
    found = candidates(made, room)
    assert {each.trains_on for each in found if not each.kinds} == {"", "L40S"}
    assert {each.trains_on for each in found if each.kinds} == {""} and len(
        {repr(each) for each in found}
    ) == len(found)
    split = {}
    for each in (
        one for one in found if not one.kinds and not one.knobs and one.gpus["trainer"] in (32, 64)
    ):
        placed = plan(each.placed(made), room, gpus=each.gpus, place=each.place).placements
        split[each.trains_on, each.gpus["trainer"]] = {
            name: sorted({host.partition("-")[0] for host in placed[name].all_hosts})
            for name in ("trainer", "generator")
        }
    both, fast, slow = ["H100", "L40S"], ["H100"], ["L40S"]
    assert split == {
        ("", 32): {"trainer": fast, "generator": both},
        ("", 64): {"trainer": fast, "generator": slow},
        ("L40S", 32): {"trainer": slow, "generator": both},
        ("L40S", 64): {"trainer": slow, "generator": fast},
    }
    assert (
        candidates(made, room, knobs=False)[0].trains_on == "" and seats(room.hosts[:2], 17) == ()
    )
    assert seats(read_devices("10xL40S").hosts, 10) == () and seats(
        read_devices("10xL40S").hosts, 4
    ) == ("L40S-0",)


def test_what_is_offered_is_asked_for_by_flags_that_are_taken(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, room = graph(model, 1, 32), read_devices("16xH100+16xL40S")
    offered = next(
        each
        for each in candidates(made, room)
        if each.trains_on and not each.knobs and each.gpus["trainer"] == 16
    )
    asked = offered.flags(made, room)
    assert asked == "--gpus generator=16,trainer=16 --place trainer=L40S-0+L40S-1"
    how = ["--foresee", "16xH100+16xL40S", "--steps", "4", "--workload", "mean=40,prompt=20"]

    def build() -> Graph:
        return graph(model, 1, 32)

    main(build, args=[*how, *asked.split(), "--draw", str(tmp_path / "found.json")])
    assert "16 x L40S" in capsys.readouterr().out
    found = foresee(
        made,
        room,
        gpus=offered.gpus,
        place=offered.place,
        steps=4,
        workload=Workload(mean_tokens=40, prompt_tokens=20),
    )
    assert json.loads((tmp_path / "found.json").read_text())["step_s"] == found.step_s
    with pytest.raises(SystemExit):
        main(build, args=[*how, "--gpus", "auto", "--place", "trainer=L40S-0"])
    assert "place is given for ['trainer']; leave it out" in " ".join(
        capsys.readouterr().err.split()
    )
    texts = {each.text for each in changes(made, offered, room)}
    assert "one more replica of the generator (1 more)" in texts


def test_by_closed_forms_generators_on_both_kinds_beat_each_kind_alone_and_ways_by_hand(
    model: Model,
) -> None:
    made, how = graph(model), {"workload": EVEN, "simulated": False}
    room = read_devices("64xH100+64xL40S")
    mixed = foresee(made, room, gpus={"generator": 72, "trainer": 56}, **how)
    assert [each.devices for each in mixed.operations] == ["8 x H100 + 64 x L40S", "56 x H100"]
    halves = [
        min(
            foresee(
                made, read_devices(f"64x{kind}"), gpus={"generator": 64 - n, "trainer": n}, **how
            ).step_s
            for n in (16, 24, 32, 40, 42, 48, 49, 56)
        )
        for kind in ("H100", "L40S")
    ]
    naive = [
        foresee(made, room, gpus={"generator": 64, "trainer": 64}, place=each, **how)
        for each in by_hand()
    ]
    assert [each.operations[1].devices for each in naive] == [
        "64 x H100",
        "64 x L40S",
        "32 x H100 + 32 x L40S",
    ]
    assert mixed.step_s < 0.8 * min(halves) and mixed.step_s < 0.92 * min(
        each.step_s for each in naive
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_auto_finds_a_plan_for_both_kinds_that_beats_each_alone_and_ways_by_hand(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, how = graph(model), {"workload": EVEN, "steps": 30}
    room = read_devices("64xH100+64xL40S")
    with monkeypatch.context() as fewer:
        fewer.setattr("dataflow.foresight.choice.candidates.MOST", 240)
        best = choose(made, room, **how).ways[0]
    assert best.candidate.kinds == () and set(best.foreseen.operations[0].kinds) == {"H100", "L40S"}
    for kind in ("H100", "L40S"):
        alone = least(made, f"64x{kind}", **how)
        assert best.foreseen.step_s < 0.85 * alone, kind
    for place in by_hand():
        naive = foresee(made, room, gpus={"generator": 64, "trainer": 64}, place=place, **how)
        assert best.foreseen.step_s < 0.95 * naive.step_s, place


def least(made: Graph, text: str, **how: Any) -> float:
    """Seconds of the shortest step of all ways, by simulation of the best four by closed forms."""
    room, found = read_devices(text), []
    for number, each in enumerate(candidates(made, room, workload=EVEN)):
        try:
            placed = each.placed(made)
            closed = foreseen_of(placed, each, room, **how, simulated=False).step_s
        except GraphError:
            continue
        found.append((closed, number, placed, each))
    return min(
        foreseen_of(placed, each, room, **how).step_s for _, _, placed, each in sorted(found)[:4]
    )


def test_siblings_prompt_is_taken_in_once_by_closed_forms_and_by_the_clock(model: Model) -> None:
    long = Workload(mean_tokens=128, prompt_tokens=800, sigma=0.0)
    closed, found = (
        foresee(
            graph(model, prompts=64),
            read_devices("20xH100"),
            gpus={"generator": 4, "trainer": 16},
            steps=30,
            workload=long,
            simulated=each,
        )
        for each in (False, True)
    )
    assert found.bottleneck.node == closed.bottleneck.node == "generator"
    assert closed.step_s == pytest.approx(found.step_s, rel=0.15)


def test_ranks_wait_for_shards_where_products_do_not_hide_the_exchange(model: Model) -> None:
    counts, kind = counts_of(model.source), device_kind("A100")
    alone, node, many = (Learners(model=counts, kind=kind, ranks=ranks) for ranks in (1, 8, 64))
    assert exchanged_s(alone, 1, ASSUMED) == 0
    once = 8 * counts.parameters * 7 / 8 / kind.within_bytes_per_s / ASSUMED.memory
    assert exchanged_s(node, 1, ASSUMED) == pytest.approx(once)
    # gradients alone, in float32, forth and back
    assert exchanged_s(node, 8, ASSUMED) == pytest.approx(once)
    far = 8 * counts.parameters * 63 / 64 / (8 * kind.between_bytes_per_s) / ASSUMED.memory
    assert exchanged_s(many, 1, ASSUMED) == pytest.approx(far)
    near = once + 2 * 7 / 8 * 4 * counts.parameters / 8 / kind.between_bytes_per_s / ASSUMED.memory
    assert exchanged_s(many, 8, ASSUMED) == pytest.approx(near)
    tokens = 64.0 * 4 * 8192
    how = {"tokens": tokens, "at_once": 8192}
    assert waits_s(many, 1, ASSUMED, computing_s=5 * far, **how) == 0  # type: ignore[arg-type]
    assert waits_s(many, 1, ASSUMED, computing_s=far, **how) == pytest.approx(3 * far)  # type: ignore[arg-type]


def test_a_trainers_ranks_share_its_model_out_as_fits_and_is_fastest(model: Model) -> None:
    made, hosts = graph(model), read_devices("64xH100").hosts
    trainer: Any = made.operators["trainer"]
    ways = learners(trainer, hosts)
    assert ways[0] == {} and {"tensor_parallel": 8} in ways and {"dp_replicate": 8} in ways
    assert {"tensor_parallel": 2, "dp_replicate": 32} in ways and {
        "tensor_parallel": 2,
        "dp_replicate": 64,
    } not in ways
    step = LearnerStep(rollouts=4096.0, tokens=650.0, rates=ASSUMED)
    assert best_learner(made, trainer, ways, hosts, 64, step) == {}
    whole = replace(trainer, dp_replicate=64)
    assert best_learner(made, whole, learners(whole, hosts), hosts, 64, step) == {"dp_replicate": 1}
    cut = replace(trainer, tensor_parallel=8)
    chosen = best_learner(made, cut, learners(cut, hosts), hosts, 64, step)
    assert chosen == {"tensor_parallel": 1}
    wide = replace(trainer, gradient_checkpointing=False, micro_batch_tokens=1 << 14)
    assert best_learner(made, wide, learners(wide, hosts), hosts, 64, step)["tensor_parallel"] > 1
    assert best_learner(made, trainer, ways, hosts, 7, step) == {}
    few = LearnerStep(rollouts=64.0, tokens=100.0, rates=replace(ASSUMED, compute=1.0))
    slow = read_devices("64xA100").hosts
    assert (
        best_learner(made, trainer, learners(trainer, slow), slow, 64, few)["tensor_parallel"] > 1
    )
    refused = Candidate(gpus={"generator": 8, "trainer": 56}, learner={"dp_replicate": 3})
    with pytest.raises(GraphError, match=r"has dp_replicate=3, which does not divide them"):
        plan(refused.placed(made), read_devices("64xH100"), gpus=refused.gpus)
    asked = Candidate(
        gpus={"generator": 8, "trainer": 56}, knobs={"tensor_parallel": 2}, learner=chosen
    )
    assert asked.flags(made, read_devices("64xH100")).endswith(
        "Generator(tensor_parallel=2) Trainer(tensor_parallel=1)"
    )


def test_auto_chooses_a_trainers_knobs_where_the_declared_ones_do_not_fit(model: Model) -> None:
    (Path(model.source) / "config.json").write_text(json.dumps(LLAMA_405B))
    made, room = graph(model, 2, 64), read_devices("1024xH200")
    trainer: Any = made.operators["trainer"]
    made = made.swap("trainer", replace(trainer, dp_replicate=16))
    found = candidates(made, room, workload=EVEN)
    assert len(found) <= 1000 and any(each.learner.get("dp_replicate") == 1 for each in found)
    taken = next(
        each
        for each in found
        if each.gpus["trainer"] == 512 and each.knobs.get("tensor_parallel") == 8
    )
    assert taken.learner["dp_replicate"] == 1
    foresee(taken.placed(made), room, gpus=taken.gpus, workload=EVEN, simulated=False)
    with pytest.raises(
        GraphError, match=r"needs 512 GPUs of 2\d\d\.\d GiB .* has 8 of 8 GPUs of 131\.3 GiB free"
    ):
        foresee(
            replace(taken, learner={}).placed(made),
            room,
            gpus=taken.gpus,
            workload=EVEN,
            simulated=False,
        )
