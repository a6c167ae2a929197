"""Whole runs whose nodes take turns on one memory: the same steps as with a memory for each, one
awake at a time.
"""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow.compute as pc
import pytest
from rigs.graphs import fake_graph, reward, tiny_graph, words
from rigs.operators import struck

from dataflow import Graph, LoRA, Model, inline, join, run
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits, Patience
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from operators import Generator, Logprobs, Prompts, Trainer
from operators.credit import advantage

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(120)]


FIGURES = ("loss", "grad_norm", "reward_mean", "completion_tokens_mean", "staleness_max")


MODEL = Model("fake-policy")


STEPS = 3


def steps_of(graph: Any, runs: Path, **how: Any) -> tuple[RunFolder, list[Any], list[float]]:
    """What a run made, step by step: every token and its version; figures and log-probabilities."""
    result = run(graph, runs=runs, quiet=True, steps=STEPS, **how)
    assert (result.steps, result.verdict.clean) == (STEPS, True), result.verdict.line
    folder = RunFolder.open(result.folder)
    numbers = [line[name] for line in result.metrics if "loss" in line for name in FIGURES]
    tables = [folder.rollouts_of().read(step) for step in range(1, STEPS + 1)]
    tokens = [
        table.select(["group_id", "position", "tokens", "versions"]).to_pylist() for table in tables
    ]
    numbers += [
        value for table in tables for row in table.column("logprobs").to_pylist() for value in row
    ]
    return folder, tokens, numbers


def both(
    policy: Path, tmp_path: Path, knobs: dict[str, Any], *, within: float = 0.0, **how: Any
) -> RunFolder:
    """Run with a memory for each, and shared; the folder of the latter, which made the same, bit
    for bit or within so much.
    """
    _, tokens, numbers = steps_of(
        tiny_graph(policy, max_staleness=0, **knobs), tmp_path / "alone", **how
    )
    graph = tiny_graph(policy, max_staleness=0, **knobs)
    folder, shared_tokens, shared_numbers = steps_of(
        graph, tmp_path / "shared", gpus="shared", **how
    )
    assert shared_tokens == tokens
    assert shared_numbers == (
        pytest.approx(numbers, rel=within, abs=within / 10) if within else numbers
    )
    assert any(
        "take turns on main memory" in line for line in folder.read_json("config.json")["plan"]
    )
    return folder


def test_a_run_in_one_process_makes_the_same_steps_in_turns(policy: Path, tmp_path: Path) -> None:
    both(policy, tmp_path, {}, on=inline())


# Of int8 and of a generator's ranks the last bits of products depend on what happens to be decoded
# together; of int8 they also decide to which step a weight is rounded after an update, which moves
# logits by more.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared memory": ({}, {}),
    "two ranks": ({}, {"ranks": {"trainer": 2}}),
    "gloo": ({}, {"weights": "gloo"}),
    "a generator of two ranks": ({"generator_knobs": {"tensor_parallel": 2}}, {"within": 1e-4}),
    "two ranks to two": (
        {"generator_knobs": {"tensor_parallel": 2}},
        {"ranks": {"trainer": 2}, "within": 1e-4},
    ),
    "two replicas of two ranks": (
        {"generator_knobs": {"tensor_parallel": 2}, "model_knobs": {"lora": LoRA(rank=4)}},
        {"replicas": {"generator": 2}, "within": 1e-4},
    ),
    "replicas": ({}, {"replicas": {"generator": 2}}),
    "adapters": ({"model_knobs": {"lora": LoRA(rank=4)}}, {}),
    "int8": ({"generator_knobs": {"weights": "int8"}}, {"within": 1e-2}),
    "bfloat16": ({"model_knobs": {"dtype": "bfloat16"}}, {}),
    "evaluations": ({"eval_every": 1}, {}),
}


@pytest.mark.parametrize(
    "way",
    [way if way == "shared memory" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS],
)
def test_a_run_in_processes_makes_the_same_steps_in_turns(
    way: str, policy: Path, machine: None, tmp_path: Path
) -> None:
    knobs, how = WAYS[way]
    both(policy, tmp_path, knobs, **how)


def with_a_reference(policy: Path, ranks: int = 1) -> Graph:
    """A frozen reference, and a critic that its trainer refreshes, beside generator and trainer.
    ranks: of each.
    """
    g, model = Graph("reference"), Model(str(policy), name="policy")
    generator = Generator(model, group_size=4, max_tokens=12, segment_tokens=4, slots=32)
    reference = Logprobs(model.frozen(), name="ref_logprobs", tensor_parallel=ranks)
    proximal = Logprobs(model, name="proximal_logprobs", tensor_parallel=ranks)
    rollouts = reward(generator(g.source(Prompts(words(), columns=("answer",)))))
    trainer = Trainer(model, loss=with_kl, prompts_per_step=4, lr=1e-2, normalize="rollouts")
    trainer(advantage(join(reference(rollouts), proximal(rollouts))))
    g.feedback(trainer.weights, generator, max_staleness=0)
    g.feedback(trainer.weights, proximal, max_staleness=0)
    return g


def with_kl(new_logprobs: Any, proximal_logprobs: Any, ref_logprobs: Any, advantage: Any) -> Any:
    ratio = ref_logprobs - new_logprobs
    return -(advantage * (new_logprobs - proximal_logprobs).exp()) + 0.05 * (
        ratio.exp() - ratio - 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_references_take_their_turns_with_generator_and_trainer(
    ranks: int, policy: Path, machine: None, tmp_path: Path
) -> None:
    _, tokens, numbers = steps_of(with_a_reference(policy, ranks), tmp_path / "alone")
    graph = with_a_reference(policy, ranks)
    folder, shared_tokens, shared_numbers = steps_of(graph, tmp_path / "shared", gpus="shared")
    assert shared_tokens == tokens and shared_numbers == pytest.approx(numbers, rel=1e-4, abs=1e-5)
    (line,) = [line for line in folder.read_json("config.json")["plan"] if "take turns" in line]
    assert line.startswith(
        "'generator', 'ref_logprobs', 'proximal_logprobs' and 'trainer' take turns on main memory"
    )


@pytest.mark.slow
def test_with_staleness_a_turn_is_of_several_steps(
    policy: Path, machine: None, tmp_path: Path
) -> None:
    graph = tiny_graph(policy, max_staleness=2)
    result = run(graph, steps=6, gpus="shared", runs=tmp_path, quiet=True)
    assert (result.steps, result.verdict.clean) == (6, True), result.verdict.line
    folder = RunFolder.open(result.folder)
    drawn = [
        set(
            pc.unique(
                pc.list_flatten(folder.rollouts_of().read(step).column("versions"))
            ).to_pylist()
        )
        - {-1}
        for step in range(1, 7)
    ]
    assert drawn[:3] == [{0}, {0}, {0}], "the generator draws for three steps before its turn ends"
    assert all(step - 1 - min(versions) <= 2 for step, versions in enumerate(drawn, 1))


def taught(policy: Path) -> Graph:
    """A generator that nobody feeds, and a trainer that learns from what it says."""
    g, teacher = Graph("taught"), Model(str(policy), name="teacher")
    generator = Generator(teacher.frozen(), group_size=4, max_tokens=12, segment_tokens=4, slots=32)
    rollouts = reward(generator(g.source(Prompts(words(), columns=("answer",)))))
    trainer = Trainer(
        Model(str(policy), name="student"), loss=imitating, prompts_per_step=4, lr=1e-2
    )
    trainer(advantage(rollouts))
    return g


def imitating(new_logprobs: Any, advantage: Any) -> Any:
    return -new_logprobs * advantage


def test_a_generator_that_nobody_feeds_ends_its_turn_when_what_it_made_is_waited_for(
    policy: Path, machine: None, tmp_path: Path
) -> None:
    _, tokens, numbers = steps_of(taught(policy), tmp_path / "alone")
    _, shared_tokens, shared_numbers = steps_of(taught(policy), tmp_path / "shared", gpus="shared")
    assert shared_tokens == tokens and shared_numbers == numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param("generator", signal.SIGKILL, marks=pytest.mark.slow),
        ("generator", signal.SIGSTOP),
        ("trainer", signal.SIGKILL),
        pytest.param("trainer", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
    ids=["generator-killed", "generator-stopped", "trainer-killed", "trainer-stopped"],
)
def test_a_turn_is_not_lost_with_the_worker_that_had_it(
    name: str, number: int, light: None, forked: None, tmp_path: Path
) -> None:
    source, generator = FakePrompts(size=64), FakeGenerator(model=MODEL)
    trainer, mark = FakeTrainer(model=MODEL), tmp_path / "struck"
    chosen: dict[str, Any] = {"generator": generator, "trainer": trainer}

    def blow() -> None:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), number)

    chosen[name] = struck(chosen[name], blow)
    limits = Limits(stop_s=2.0, stopped_s=0.2, patience=Patience(first_s=0.05, of_one=2))
    graph = fake_graph(source=source, **chosen)
    result = run(graph, gpus="shared", runs=tmp_path / "runs", quiet=True, limits=limits)
    assert (
        mark.exists()
        and result.verdict.clean
        and "64 groups issued = 64 trained" in result.verdict.line
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generator", "trainer"])
def test_a_real_worker_that_dies_in_its_turn_comes_back_to_the_same_steps(
    name: str, policy: Path, machine: None, tmp_path: Path
) -> None:
    _, tokens, numbers = steps_of(tiny_graph(policy, max_staleness=0), tmp_path / "alone")
    graph, mark = tiny_graph(policy, max_staleness=0), tmp_path / "struck"

    def blow() -> None:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    object.__setattr__(
        graph.operators[name], "build", struck(graph.operators[name], blow, after=3).build
    )
    _, found_tokens, found_numbers = steps_of(graph, tmp_path / "shared", gpus="shared")
    assert mark.exists() and found_tokens == tokens and found_numbers == numbers


@pytest.mark.slow
def test_every_rank_has_its_turn_open_so_that_it_ends_with_the_last(
    policy: Path, machine: None, tmp_path: Path
) -> None:
    graph = tiny_graph(policy, max_staleness=0, generator_knobs={"tensor_parallel": 2})

    def look(name: str) -> None:
        found = {
            process.pid
            for process in [psutil.Process(), *psutil.Process().children()]
            if any(Path(each.path).name == "turns-0" for each in process.open_files())
        }
        (tmp_path / name).write_text(" ".join(map(str, found)))

    for name in ("generator", "trainer"):
        operator = graph.operators[name]
        object.__setattr__(operator, "build", struck(operator, partial(look, name), after=3).build)
    result = run(
        graph, steps=2, gpus="shared", ranks={"trainer": 2}, runs=tmp_path / "runs", quiet=True
    )
    assert (result.steps, result.verdict.clean) == (2, True), result.verdict.line
    assert [len((tmp_path / name).read_text().split()) for name in ("generator", "trainer")] == [
        2,
        2,
    ]
