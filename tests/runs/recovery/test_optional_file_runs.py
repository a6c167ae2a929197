"""Whatever becomes of the files that a run can do without, it is made, judged, shown, resumed and
replayed.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rigs.graphs import fake_graph, tiny_graph

from dataflow import Devices, Result, cli, inline, run
from dataflow.doctor.report import examine
from dataflow.folder.run_folder import RunFolder
from dataflow.history.launch import Wishes
from dataflow.history.replay import report_replay
from dataflow.scheduler.requests import ask_for_facts

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]


NEEDED = (
    "ledger.db",
    "ledger.db-wal",
    "ledger.db-shm",
    "rollouts",
    "checkpoints",
    "finished",
    "lock",
)


"""All others are extras. The lock is empty of content: it keeps two schedulers apart."""


ALSO = (
    "activity.jsonl",
    "foreseen.json",
    "faults.jsonl",
    "control.json",
    "doctor-1.txt",
    "trace-1.json",
    "logs/trainer-0.log",
    "logs/trainer-0.trace",
    "logs/inline-0.recent-0.jsonl",
)


"""What runs leave as they go on, or end in several processes, or doctors."""


KNOWN = {
    "config.json",
    "graph.json",
    "graph.svg",
    "metrics.jsonl",
    "times.json",
    "trace.json",
    "curve.svg",
    *ALSO,
}


def extras(folder: Path) -> list[Path]:
    found = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] not in NEEDED
    ]
    return sorted({*found, *(folder / name for name in ALSO)})


def missing(path: Path) -> None:
    path.unlink(missing_ok=True)


def torn(path: Path) -> None:
    content = path.read_bytes() if path.exists() else b'{"worker": "trainer-0", "cause": "died"}\n'
    path.write_bytes(content[: len(content) * 2 // 3])


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff{[\n]\nnull\n7\n")


def other_json(path: Path) -> None:
    path.write_text(
        '{"seconds": "x", "busy_seconds": 7, "address": 3, "pid": "x", "resumed": 1, "loss": 0}\n'
    )


def folder_in_its_place(path: Path) -> None:
    """No rename and no unlink takes it away, and no open reads or writes it, not even as root."""
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "something").touch()


SPOILS = [missing, torn, garbage, other_json, folder_in_its_place]


Spoil = Callable[[Path], None]


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Result]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["dataflow.runner"], "this_machine", lambda: Devices(cpus=1))
        yield run(
            fake_graph(), steps=3, on=inline(), runs=tmp_path_factory.mktemp("half"), quiet=True
        )


@pytest.fixture(scope="module")
def trained(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Result]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["dataflow.runner"], "this_machine", lambda: Devices(cpus=1))
        yield run(
            tiny_graph(policy, max_staleness=0, eval_every=2),
            steps=2,
            on=inline(),
            runs=tmp_path_factory.mktemp("trained"),
            quiet=True,
        )


def copy(of: Result, to: Path) -> Path:
    return Path(shutil.copytree(of.folder, to / "run"))


def looked_at(folder: Path) -> None:
    """Judged, shown and doctored as ever."""
    assert cli.check(folder) == 0
    assert cli.show(folder) == 0
    assert "last step" in examine(folder, ask_for_facts)


def test_the_list_of_extras_is_whole(half: Result, trained: Result) -> None:
    for result in (half, trained):
        assert {str(path.relative_to(result.folder)) for path in extras(result.folder)} == KNOWN


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KNOWN))
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_run_goes_on_and_is_judged_without_any_one_of_them(
    half: Result, tmp_path: Path, name: str, spoil: Spoil
) -> None:
    folder = copy(half, tmp_path)
    spoil(folder / name)
    looked_at(folder)
    whole = run(fake_graph(), steps=5, on=inline(), resume=folder, quiet=True)
    assert whole.verdict.clean and whole.steps == 5, whole.verdict
    looked_at(folder)


@pytest.mark.parametrize(
    "spoil",
    [
        missing,
        garbage,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (torn, other_json, folder_in_its_place)
        ),
    ],
)
def test_a_run_goes_on_and_is_judged_without_all_of_them(
    half: Result, tmp_path: Path, spoil: Spoil
) -> None:
    folder = copy(half, tmp_path)
    for path in extras(folder):
        spoil(path)
    looked_at(folder)
    whole = run(fake_graph(), steps=5, on=inline(), resume=folder, quiet=True)
    assert whole.verdict.clean and whole.steps == 5, whole.verdict
    looked_at(folder)


@pytest.mark.slow
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_trained_run_is_replayed_and_goes_on_without_all_of_them(
    trained: Result, policy: Path, tmp_path: Path, spoil: Spoil
) -> None:
    folder = copy(trained, tmp_path)
    for path in extras(folder):
        spoil(path)
    looked_at(folder)
    graph = tiny_graph(policy, max_staleness=0, eval_every=2)
    assert report_replay(graph, Wishes(run=str(folder))) == 0
    assert cli.replay(folder, rollout=0, source="prompts", json=True) == 0
    whole = run(graph, steps=3, on=inline(), resume=folder, quiet=True)
    assert whole.verdict.clean and whole.steps == 3, whole.verdict
    looked_at(folder)


def test_a_run_that_can_write_none_of_them_comes_to_its_end(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RunFolder.create

    def spoilt(*args: object, **how: object) -> RunFolder:
        folder = made(*args, **how)  # type: ignore[arg-type]
        for name in KNOWN:
            folder_in_its_place(folder.path / name)
        return folder

    monkeypatch.setattr(RunFolder, "create", spoilt)
    result = run(
        tiny_graph(policy, max_staleness=0, eval_every=2),
        steps=2,
        on=inline(),
        runs=tmp_path,
        quiet=True,
    )
    assert result.verdict.clean and result.steps == 2, result.verdict
    looked_at(result.folder)


@pytest.mark.slow
def test_processes_that_can_write_none_of_them_come_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RunFolder.create

    def spoilt(*args: object, **how: object) -> RunFolder:
        folder = made(*args, **how)  # type: ignore[arg-type]
        for name in [*KNOWN, "logs/generator-0.log", "logs/generator-0.trace"]:
            folder_in_its_place(folder.path / name)
        return folder

    monkeypatch.setattr(RunFolder, "create", spoilt)
    result = run(fake_graph(), steps=3, runs=tmp_path, quiet=True)
    assert result.verdict.clean and result.steps == 3, result.verdict
