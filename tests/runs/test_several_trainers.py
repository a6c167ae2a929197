"""Several trainers in one run, as an actor and a critic: each with its own steps, rollouts,
checkpoints, outcomes.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from rigs.graphs import fake_graph, reward, words
from rigs.operators import slow

from dataflow import Graph, Model, inline, run
from dataflow.folder.checkpoints import MARKER
from dataflow.folder.copies.process import bring_back
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.node import Transform
from dataflow.records import GROUP_ID, Columns
from dataflow.rules import QueuedGroup, ReorderBuffer
from dataflow.runtime import Batch, Context, Runtime
from dataflow.staleness import admit
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from operators import Generator, Prompts, Trainer
from operators.credit import advantage
from operators.losses import aipo

STEPS = 4


@dataclass(frozen=True, eq=False)
class Judge(Transform):
    """Reads a second model, as a critic's forward operator does: adds the version it has, once the
    bound lets it.
    """

    model: Model
    name: str = field(default="judge", kw_only=True)

    def provides(self, columns: Columns) -> Columns:
        return {**columns, "judged_by": pa.int64()}

    def build(self, context: Context) -> Runtime:
        return _Judging(self, context)


class _Judging(Runtime):
    def __init__(self, judge: Judge, context: Context) -> None:
        from operators.models.loading import load_model

        self._tensors = dict(
            load_model(judge.model, device="cpu", dtype="float32").named_parameters()
        )
        assert context.weights.reader is not None
        self._reader = context.weights.reader(
            {name: tensor.detach() for name, tensor in self._tensors.items()}
        )
        self._bound = context.graph.feedback
        self._held: list[QueuedGroup] = []

    def room(self) -> int:
        return 1 << 20

    def push(self, batch: Batch) -> None:
        """Group by group: one may be in time while those that it came with are not."""
        buffer = ReorderBuffer()
        buffer.add(batch)
        self._source = batch.source
        self._held += buffer.rest()

    def pending(self) -> int:
        return len(self._held)

    def waits(self) -> list[Any]:
        socket = getattr(self._reader, "socket", None)
        return [] if socket is None else [socket]

    def work(self) -> list[Batch] | None:
        if self._reader.poll() is not None:
            self._reader.adopt()
        ready = [group for group in self._held if self._in_time(group.group_id)]
        if not ready:
            return None
        self._held = [group for group in self._held if group not in ready]
        made = []
        for group in ready:
            column = pa.array([self._reader.version] * group.records.num_rows, pa.int64())
            made.append(Batch(self._source, group.records.append_column("judged_by", column)))
            group.release()
        return made

    def _in_time(self, group_id: int) -> bool:
        bound, version = self._bound, self._reader.version
        dropped = int(self._reader.note.get("dropped", 0))
        return version >= 0 and admit(
            group_id, dropped, version, bound.prompts_per_step, bound.max_staleness
        )


def actor_and_critic(
    policy: Path,
    *,
    max_staleness: int = 0,
    critic_prompts: int = 4,
    generator_knobs: dict[str, Any] | None = None,
) -> Graph:
    g, actor, critic = Graph("two"), Model(str(policy)), Model(str(policy), name="critic")
    knobs: dict[str, Any] = {"group_size": 4, "max_tokens": 12, "segment_tokens": 4, "slots": 32}
    generator, judge = Generator(actor, **(knobs | (generator_knobs or {}))), Judge(critic)
    rows = advantage(reward(judge(generator(g.source(Prompts(words(), columns=("answer",)))))))
    shared: dict[str, Any] = {"loss": partial(aipo, rho=4.0), "lr": 1e-2, "normalize": "rollouts"}
    train_actor = Trainer(actor, name="train_actor", prompts_per_step=4, **shared)
    train_critic = Trainer(
        critic, name="train_critic", prompts_per_step=critic_prompts, checkpoint_every=2, **shared
    )
    train_actor(rows)
    train_critic(rows)
    g.feedback(train_actor.weights, generator, max_staleness=max_staleness)
    g.feedback(train_critic.weights, judge, max_staleness=max_staleness)
    return g


def groups_by_step(folder: RunFolder, node: str, steps: int = STEPS) -> list[list[int]]:
    tables = [folder.rollouts_of(node).read(step) for step in range(1, steps + 1)]
    return [pc.unique(table.column(GROUP_ID)).to_pylist() for table in tables]


@pytest.mark.parametrize("in_processes", [False, True])
def test_two_trainers_of_one_stream_train_each_group_once_each_and_keep_their_own(
    policy: Path, machine: None, one_core: None, tmp_path: Path, in_processes: bool
) -> None:
    where = None if in_processes else inline()
    result = run(actor_and_critic(policy), steps=STEPS, on=where, runs=tmp_path, quiet=True)
    folder = RunFolder.open(result.folder)
    assert (result.steps, result.verdict.clean) == (STEPS, True), result.verdict
    assert "train_actor: 16 groups issued = 16 trained" in result.verdict.summary
    assert "train_critic: 16 groups issued = 16 trained" in result.verdict.summary
    wanted = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups_by_step(folder, "train_actor") == groups_by_step(folder, "train_critic") == wanted
    made = [(line["node"], line["step"]) for line in result.metrics]
    assert sorted(made) == [
        (node, step) for node in ("train_actor", "train_critic") for step in range(1, STEPS + 1)
    ]

    from transformers import AutoModelForCausalLM

    assert folder.checkpoints_of("train_actor").steps() == [4]
    assert folder.checkpoints_of("train_critic").steps() == [2, 4]
    weights = [
        AutoModelForCausalLM.from_pretrained(folder.latest_checkpoint(node=node)).lm_head.weight
        for node in ("train_actor", "train_critic")
    ]
    assert all(weight.isfinite().all() for weight in weights)
    assert (folder.rollouts / "step-000001.arrow").exists() is False


def test_a_synchronous_run_judges_and_generates_with_the_weights_of_the_step_before(
    policy: Path, machine: None, one_core: None, tmp_path: Path
) -> None:
    result = run(actor_and_critic(policy, max_staleness=0), steps=STEPS, runs=tmp_path, quiet=True)
    folder = RunFolder.open(result.folder)
    for step in range(1, STEPS + 1):
        table = folder.rollouts_of("train_critic").read(step)
        assert set(pc.list_flatten(table.column("versions")).to_pylist()) <= {-1, step - 1}
        assert set(table.column("judged_by").to_pylist()) == {step - 1}


@pytest.mark.slow
@pytest.mark.parametrize("critic_prompts", [2, 6])
def test_trainers_whose_steps_differ_in_size_both_come_to_the_last_one(
    policy: Path, machine: None, one_core: None, tmp_path: Path, critic_prompts: int
) -> None:
    graph = actor_and_critic(policy, max_staleness=1, critic_prompts=critic_prompts)
    result = run(graph, steps=STEPS, runs=tmp_path, quiet=True)
    assert result.verdict.clean, result.verdict
    with Ledger.open(RunFolder.open(result.folder).ledger, readonly=True) as ledger:
        trained = [ledger.counts(node).trained for node in ("train_actor", "train_critic")]
    assert trained == [4 * STEPS, critic_prompts * STEPS]


def test_the_critic_s_version_makes_no_group_stale(
    policy: Path, machine: None, one_core: None, tmp_path: Path
) -> None:
    """Its steps are four times as many as those that made the tokens."""
    result = run(
        actor_and_critic(policy, max_staleness=0, critic_prompts=1),
        steps=STEPS,
        on=inline(),
        runs=tmp_path,
        quiet=True,
    )
    assert result.verdict.clean, result.verdict
    assert all(line["dropped"] == {} for line in result.metrics)
    config = RunFolder.open(result.folder).read_json("config.json")
    assert config["max_staleness"] == {"train_actor": 0, "train_critic": None}


def test_the_summary_and_the_curve_tell_of_the_trainer_that_feeds_the_generator(
    policy: Path, machine: None, one_core: None, tmp_path: Path
) -> None:
    from dataflow.history.summary import summarize

    graph = actor_and_critic(policy, critic_prompts=2, max_staleness=1)
    result = run(graph, steps=STEPS, on=inline(), runs=tmp_path, quiet=True)
    folder = RunFolder.open(result.folder)
    summary = summarize(folder, result.verdict.line, result.verdict.clean)
    actors = [line for line in result.metrics if line["node"] == "train_actor"]
    assert (summary.steps, summary.rollouts) == (STEPS, sum(line["rollouts"] for line in actors))
    assert summary.reward_after == actors[-1]["reward_mean"]
    assert json.loads(folder.config.read_text())["leading"] == ["train_actor"]


def two_fakes(critic_slow_s: float, count: int = 64) -> Graph:
    g, actor, critic = Graph("fakes"), Model("fake-policy"), Model("fake-critic")
    generator, trainer = FakeGenerator(model=actor), FakeTrainer(model=actor, name="actor")
    rows = reward(generator(g.source(FakePrompts(size=count))))
    trainer(rows)
    slow(FakeTrainer(model=critic, name="critic", prompts_per_step=4), critic_slow_s)(rows)
    g.feedback(trainer.weights, generator, max_staleness=1_000_000)
    return g


def test_a_run_ends_when_the_slowest_of_its_trainers_has_made_its_steps(
    light: None, tmp_path: Path
) -> None:
    result = run(two_fakes(0.02), steps=5, runs=tmp_path, quiet=True)
    folder = RunFolder.open(result.folder)
    assert result.verdict.clean, result.verdict
    assert groups_by_step(folder, "actor", 5)[-1] == list(range(32, 40))
    assert groups_by_step(folder, "critic", 5)[-1] == list(range(16, 20))


def test_one_trainer_keeps_what_it_makes_where_it_always_did(light: None, tmp_path: Path) -> None:
    result = run(fake_graph(), steps=2, runs=tmp_path, quiet=True)
    folder = RunFolder.open(result.folder)
    assert sorted(path.name for path in folder.rollouts.iterdir()) == [
        "step-000001.arrow",
        "step-000002.arrow",
    ]
    assert dataclasses.asdict(folder.checkpoints)["path"] == folder.path / "checkpoints"


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_behind",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["both at the last step", "the critic behind"],
)
def test_both_trainers_go_on_from_their_copies_at_an_address_under_one_ledger(
    policy: Path, machine: None, one_core: None, tmp_path: Path, is_behind: bool
) -> None:
    there = tmp_path / "there"
    begun = run(
        actor_and_critic(policy),
        steps=STEPS,
        on=inline(),
        runs=tmp_path / "one",
        quiet=True,
        checkpoint_to=str(there),
    )
    [place] = (there / begun.folder.name).glob("part-*/checkpoints")
    if is_behind:
        (place / "train_critic/step-000004" / MARKER).unlink()
    folder = bring_back(str(there), tmp_path / "two")
    assert folder.checkpoints_of("train_actor").steps() == [4]
    assert folder.checkpoints_of("train_critic").steps() == [2 if is_behind else 4]
    result = run(
        actor_and_critic(policy), steps=STEPS + 2, on=inline(), resume=folder.path, quiet=True
    )
    assert result.verdict.clean, result.verdict
    with Ledger.open(folder.ledger, readonly=True) as ledger:
        for node in ("train_actor", "train_critic"):
            groups = [group for step in ledger.steps(node) for group in step.trained]
            assert len(groups) == len(set(groups)) == 4 * (STEPS + 2)
