"""A program that another user's run folder names runs with this user's rights only if he says
so.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataflow import Graph, Model, run
from dataflow.cli import main
from dataflow.errors import GraphError, RunError
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.history.launch import Launch, start_again, trusted
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path, "begun")
    program = tmp_path / "program.py"
    program.write_text("")
    begun = Launch(file=str(program), arguments=("--lr", "1"), folder=str(tmp_path))
    made.write_json("config.json", {"steps": 3, "seed": 0, "launch": begun})
    made.write_json("graph.json", {"name": "begun", "nodes": [], "edges": []})
    return made


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What would have been run."""
    found: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATAFLOW_TRUSTED", "")
    monkeypatch.setattr(os, "execv", lambda program, command: found.append(command))
    return found


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """This user is another than the one who owns the folder."""
    monkeypatch.setattr(os, "getuid", lambda uid=os.getuid(): uid + 1)


class Terminal:
    """Somebody who says this."""

    def __init__(self, says: str) -> None:
        self.says = says

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self.says

    def write(self, text: str) -> int:
        self.asked = getattr(self, "asked", "") + text
        return len(text)

    def flush(self) -> None:
        pass


def test_ones_own_folder_is_gone_on_with_without_a_question(
    folder: RunFolder, ran: list[Any]
) -> None:
    start_again(folder, "--resume", "x")
    assert ran[0][2:] == ["--lr", "1", "--resume", "x"]


@pytest.mark.parametrize(
    "begin", [lambda f: start_again(f), lambda f: cli("resume", f), lambda f: cli("replay", f)]
)
def test_anothers_folder_is_refused_where_nobody_can_be_asked(
    folder: RunFolder,
    ran: list[Any],
    stranger: None,
    begin: Callable[[RunFolder], object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises((RunError, SystemExit)) as found:
        begin(folder)
    said = f"{found.value} {capsys.readouterr().err}"
    assert ran == []
    for part in ("belongs to user", "program.py --lr 1", "rights", "--trust"):
        assert part in said


@pytest.mark.parametrize("words", [["resume"], ["replay"]])
def test_a_flag_says_that_it_may(
    folder: RunFolder, ran: list[Any], stranger: None, words: list[str]
) -> None:
    with pytest.raises(SystemExit):
        cli(*words, folder, "--trust")
    assert len(ran) == 1


@pytest.mark.parametrize(
    ("says", "runs"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_at_a_terminal_somebody_is_asked(
    folder: RunFolder,
    ran: list[Any],
    stranger: None,
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    runs: bool,
) -> None:
    terminal = Terminal(says)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    try:
        start_again(folder)
    except RunError:
        assert not runs
    assert bool(ran) is runs
    assert "program.py --lr 1" in terminal.asked and str(folder.path) in terminal.asked


def test_the_file_that_names_the_program_counts_too(
    folder: RunFolder, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of one's own, in which another has put a config.json."""
    real = Path.stat

    def stat(path: Path, **knobs: Any) -> Any:
        facts = real(path, **knobs)
        return (
            os.stat_result((*facts[:4], facts.st_uid + 1, *facts[5:]))
            if path.name == "config.json"
            else facts
        )

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(RunError, match="--trust"):
        start_again(folder)
    assert ran == []


def cli(verb: str, folder: RunFolder, *more: str) -> None:
    before, sys.argv = sys.argv, ["dataflow", verb, str(folder.path), *more]
    try:
        main()
    finally:
        sys.argv = before


@pytest.mark.skipif(os.getuid() != 0, reason="who is not root gives no file away")
@pytest.mark.parametrize("name", ["ledger.db", "ledger.db-wal", "config.json", "graph.json", ""])
@pytest.mark.parametrize(("owner", "mode"), [(4321, 0o644), (0, 0o666)])
def test_of_all_that_a_program_is_taken_from_the_owner_counts_and_who_may_write_it(
    folder: RunFolder, ran: list[Any], name: str, owner: int, mode: int
) -> None:
    with Ledger.create(folder.ledger) as ledger:
        ledger.set_facts(
            {"config": folder.read_json("config.json"), "graph": folder.read_json("graph.json")}
        )
        path = folder.path / name
        os.chown(path, owner, -1)
        path.chmod(mode | 0o111 * path.is_dir())
        why = "belongs to user 4321" if owner else "may be written by others"
        why = f"has a {name} that {why}" if name else why
        with pytest.raises(RunError, match=f"{why}.*dataflow resume --trust"):
            trusted(folder)
        with pytest.raises(
            RunError, match=f"{why}.*, and what it names would run with your rights"
        ):
            start_again(folder)
        assert ran == []
        start_again(folder, trust=True)
        assert len(ran) == 1 and trusted(folder) is folder
        os.chown(path, 0, -1)


def test_a_folder_without_its_copies_for_people_is_gone_on_with(
    folder: RunFolder, ran: list[Any]
) -> None:
    with Ledger.create(folder.ledger) as ledger:
        ledger.set_facts(
            {"config": folder.read_json("config.json"), "graph": folder.read_json("graph.json")}
        )
    folder.config.unlink()
    folder.graph_json.unlink()
    start_again(folder)
    assert len(ran) == 1


@pytest.mark.parametrize("place", ["argument", "folder", "runs", "graph"])
def test_bytes_that_are_no_text_are_refused_by_name_before_anything_is_made(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "\udcff"
    bad.mkdir()
    runs, name = (
        bad if place == "runs" else tmp_path / "runs",
        "\udcff" if place == "graph" else "name",
    )
    monkeypatch.setattr(sys, "argv", ["program", str(bad)] if place == "argument" else ["program"])
    monkeypatch.chdir(bad if place == "folder" else tmp_path)
    what = {
        "argument": "an argument of",
        "folder": "the folder it starts in",
        "runs": "the run folder",
    }
    with pytest.raises(
        GraphError, match=rf"{what.get(place, 'the graph')} .* UTF-8 .*'[^']*\\udcff"
    ):
        run(named(name), runs=runs)
    assert not list(tmp_path.glob("runs/*")) and not list(bad.iterdir())


def named(name: str) -> Graph:
    g, model = Graph("fakes"), Model(name)
    FakeTrainer(model=model)(FakeGenerator(model=model)(g.source(FakePrompts(size=4))))
    return g
