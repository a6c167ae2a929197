"""Hosts that do not see the scheduler's folder: what is refused, and what is told."""

from pathlib import Path

import pytest
from rigs.graphs import fake_graph, reward

from dataflow import Graph, GraphError, Model, RunError, join, scorer
from dataflow.agent import run_disk
from dataflow.agent.rendezvous import Rendezvous
from dataflow.folder.copies.store import Copies
from dataflow.launchers.hosted_run import check_own_folders, told_of
from dataflow.planning.hosts import Devices, Host
from dataflow.planning.plan import Plan
from dataflow.runner import make_plan
from dataflow.system.security import RunKeys
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer

COPIES = Copies(address="s3://b", run="x", part=1, token="t", trainers=("",))


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
    check_own_folders(graph, planned(graph, generator="a", trainer="c"), COPIES)
    with pytest.raises(
        GraphError,
        match=r"'join' joins branches of one stream, but host b does not see the scheduler",
    ):
        check_own_folders(graph, planned(graph, generator=("a", "b"), trainer="a"), COPIES)


def test_hosts_that_see_no_folder_in_common_are_refused_without_an_address_for_copies() -> None:
    graph = fake_graph()
    with pytest.raises(
        GraphError,
        match=r"hosts b and c do not see the scheduler's run folder, and there is no address"
        r" .*; give all hosts one folder \(runs=\), or an address for copies .*--checkpoint-to",
    ):
        check_own_folders(graph, planned(graph, trainer="a"), None)
    check_own_folders(graph, planned(graph, trainer="a"), COPIES)
    check_own_folders(graph, make_plan(graph, devices=Devices.of([A])), None)


def test_the_start_says_what_stays_where_and_what_survives() -> None:
    graph = fake_graph()
    shared = make_plan(graph, devices=Devices.of([A]))
    assert told_of(graph, shared, "/runs/x", "") == ""
    made = planned(graph, generator=("a", "b"), trainer="c")
    begin = (
        "hosts b and c do not see the scheduler's run folder /runs/x: what is made there stays at"
        " that path, on a "
    )
    assert told_of(graph, made, "/runs/x", "s3://b/x") == (
        f"{begin}disk of its own; 'trainer' stays on host 'c', and what is copied to s3://b/x"
        " survives the loss of that disk"
    )
    at_home = planned(graph, generator=("b", "c"), trainer="a")
    assert told_of(graph, at_home, "/runs/x", "s3://b/x") == f"{begin}disk of its own"


def test_an_agent_sees_the_schedulers_folder_by_this_runs_keys(tmp_path: Path) -> None:
    keys = RunKeys.make()
    assert not run_disk.sees(tmp_path / "none", keys)
    Rendezvous(address="tcp://a:1", hosts=()).write(tmp_path, keys)
    assert run_disk.sees(tmp_path, keys)


def test_keys_of_another_run_are_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_disk, "_SHOWN_S", 0.0)
    Rendezvous(address="tcp://a:1", hosts=()).write(tmp_path, RunKeys.make())
    assert not run_disk.sees(tmp_path, RunKeys.make())


def test_keys_that_are_not_those_of_the_scheduler_it_is_to_join_are_told_as_such(
    tmp_path: Path,
) -> None:
    Rendezvous(address="tcp://a:1", hosts=()).write(tmp_path, RunKeys.make())
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
