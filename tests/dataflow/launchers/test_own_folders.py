"""Hosts that do not see the scheduler's folder: what is refused, what is told, what a resume
needs.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rigs.graphs import fake_graph, reward

from dataflow import Graph, GraphError, Model, RunError, join, scorer
from dataflow.agent import run_disk
from dataflow.agent.rendezvous import Rendezvous
from dataflow.folder.checkpoints import Checkpoints
from dataflow.folder.copies.bringing_back import bring_checkpoint
from dataflow.folder.copies.parts import Copies
from dataflow.folder.ledger import Ledger
from dataflow.folder.ledger.places import HOME
from dataflow.folder.ledger.questions import ListPlaces
from dataflow.folder.ledger.upkeep import SetPlace
from dataflow.folder.run_folder import RunFolder
from dataflow.launchers import hosted_run
from dataflow.launchers.hosted_run import check_own_folders, have_checkpoints, told_of
from dataflow.planning.hosts import Devices, Host
from dataflow.planning.plan import Plan
from dataflow.runner import make_plan
from dataflow.system.security import RunKeys
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

A, B, C = (Host(name=name, cpus=2, own_folder=name != "a") for name in "abc")


@scorer(isolate=False)
def length(completion: str) -> int:
    return len(completion)


def planned(graph: Graph, **place: tuple[str, ...] | str) -> Plan:
    return make_plan(graph, devices=Devices.of([A, B, C]), place=place, replicas={"generator": 2})


def joined() -> Graph:
    g, model = Graph("joined"), Model("policy")
    generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
    stream = generator(g.source(FakePrompts()))
    trainer(join(reward(stream), length(stream)))
    g.feedback(trainer.weights, generator, max_staleness=1)
    return g


def test_branches_of_rollouts_that_may_be_drawn_anew_are_not_joined() -> None:
    graph = joined()
    check_own_folders(graph, planned(graph, generator="a", trainer="c"))
    with pytest.raises(
        GraphError,
        match=r"'join' joins branches of one stream, but host b does not see the scheduler",
    ):
        check_own_folders(graph, planned(graph, generator=("a", "b"), trainer="a"))


def test_the_start_says_what_stays_where_and_what_survives() -> None:
    graph = fake_graph()
    shared = make_plan(graph, devices=Devices.of([A]))
    assert told_of(graph, shared, "/runs/x", "") == ""
    made = planned(graph, generator=("a", "b"), trainer="c")
    begin = (
        "hosts b and c do not see the scheduler's run folder /runs/x: what is made there stays at"
        " that path, on a "
    )
    for address, end in (
        (
            "",
            (
                "'trainer' stays on host 'c', and nothing that it learns survives the loss of that"
                " disk, and no resume "
            ),
        ),
        (
            "s3://b/x",
            (
                "'trainer' stays on host 'c', and what is copied to s3://b/x survives the loss of"
                " that disk"
            ),
        ),
    ):
        said = told_of(graph, made, "/runs/x", address)
        assert said.startswith(begin) and end in said
    at_home = planned(graph, generator=("b", "c"), trainer="a")
    assert told_of(graph, at_home, "/runs/x", "") == f"{begin}disk of its own"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    """Of a run whose trainer has made 9 steps on host c."""
    made = RunFolder.create(tmp_path, "run")
    with Ledger.create(made.ledger, {"trainer": ["prompts"]}) as ledger:
        ledger.issue("prompts", [(group, "p") for group in range(9)])
        for step in range(1, 10):
            ledger.commit_step("trainer", step, version=step, source="prompts", trained=[step - 1])
    yield made


def has(folder: RunFolder, step: int, *hosts: str) -> None:
    with Ledger.open(folder.ledger) as ledger:
        for host in hosts:
            ledger.do(SetPlace(f"checkpoints/step-{step:06d}", host))


def test_a_resume_needs_a_checkpoint_that_somebody_gives(folder: RunFolder) -> None:
    graph, told = fake_graph(), list[str]()
    have_checkpoints(graph, folder, ["b"], None, told.append)  # there never was one
    has(folder, 8, "c")
    have_checkpoints(graph, folder, ["b", "c"], None, told.append)
    assert not told
    with pytest.raises(
        RunError,
        match=r"cannot go on: the checkpoint of step 8 of 'trainer' is on host c, which takes",
    ):
        have_checkpoints(graph, folder, ["b"], None, told.append)
    has(folder, 4, "b")
    have_checkpoints(graph, folder, ["b"], None, told.append)
    assert told == [
        "the checkpoint of step 8 of 'trainer' is on host c, which takes no part: the run goes on"
        " from step 4"
    ]


def test_a_newer_copy_at_the_address_comes_home_and_counts(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(folder, 8, "c")
    has(folder, 4, "b")
    copies = Copies(address="/copies", run="run", part=1, token="t", trainers=("",))

    def bring(copies: Copies, trainer: str, into: Path, above: int, upto: int, told: object) -> int:
        assert (trainer, above, upto) == ("", 4, 9)
        with Checkpoints(into / "checkpoints").writing(8) as place:
            (place / "model").touch()
        return 8

    monkeypatch.setattr(hosted_run, bring_checkpoint.__name__, bring)
    told: list[str] = []
    have_checkpoints(fake_graph(), folder, ["b"], copies, told.append)
    assert told[-1].endswith("the run goes on from step 8")
    with Ledger.open(folder.ledger) as ledger:
        assert ledger.do(ListPlaces("checkpoints/step-000008")).get(
            "checkpoints/step-000008", [HOME]
        ) == [HOME]


def test_an_agent_sees_the_schedulers_folder_by_this_runs_keys(tmp_path: Path) -> None:
    keys = RunKeys.make()
    assert not run_disk.sees(tmp_path / "none", keys)
    Rendezvous(address="tcp://a:1", number=0, hosts=()).write(tmp_path, keys)
    assert run_disk.sees(tmp_path, keys)


def test_keys_of_another_run_are_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_disk, "_SHOWN_S", 0.0)
    Rendezvous(address="tcp://a:1", number=0, hosts=()).write(tmp_path, RunKeys.make())
    assert not run_disk.sees(tmp_path, RunKeys.make())


def test_keys_that_are_not_those_of_the_scheduler_it_is_to_join_are_told_as_such(
    tmp_path: Path,
) -> None:
    Rendezvous(address="tcp://a:1", number=0, hosts=()).write(tmp_path, RunKeys.make())
    (tmp_path / "ledger.db").touch()
    with pytest.raises(
        RunError,
        match="host 'b' has other keys than the run in .*, which the scheduler at tcp://a:1",
    ):
        run_disk.make("b", tmp_path, "tcp://a:1")
    with pytest.raises(RunError, match="host 'b' comes too late"):
        run_disk.make("b", tmp_path, "tcp://b:1")


def test_a_folder_of_its_own_is_made_and_numbered_and_another_runs_is_refused(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    run_disk.make("b", folder)
    run_disk.take_up("b", folder, part=0)
    kept = folder / "finished/generator/0-0-0.prompts.arrows"
    kept.parent.mkdir()
    kept.touch()
    with pytest.raises(RunError, match="host 'b' has files of another run at"):
        run_disk.take_up("b", folder, part=0)
    run_disk.take_up("b", folder, part=2)
    assert kept.with_name("0-part2-0-0.prompts.arrows").exists() and not kept.exists()
    (folder / "ledger.db").touch()
    with pytest.raises(RunError, match="host 'b' comes too late: the run in"):
        run_disk.make("b", folder)
