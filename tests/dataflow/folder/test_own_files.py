"""Hosts that see no folder in common: which files count where, and where others come from."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rigs.ending import at_end

from dataflow.errors import Replaced, RunError
from dataflow.folder.checkpoints import Checkpoints
from dataflow.folder.copies.store import Address, Copies, Store, claim
from dataflow.folder.ledger import HOME, Ledger
from dataflow.folder.ledger.methods import METHODS
from dataflow.folder.ledger_service.client import OwnFiles
from dataflow.folder.ledger_service.messages import Join, Query, QueryResult, Refused, Token
from dataflow.folder.ledger_service.service import RequestHandler
from dataflow.folder.placing import Placing
from dataflow.folder.run_folder import RunFolder
from dataflow.system.files import RunFolderError
from transport.life import Life

STEP_3 = "rollouts/step-000003.arrow"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The scheduler's folder, with a ledger of eight steps."""
    folder = tmp_path / "home"
    folder.mkdir()
    with Ledger.create(folder / "ledger.db", {"trainer": ["prompts"]}) as ledger:
        ledger.issue("prompts", [(group, "p") for group in range(8)])
        for step in range(1, 9):
            ledger.commit_step("trainer", step, version=step, source="prompts", trained=[step - 1])
    return folder


@pytest.fixture
def ledger(home: Path) -> Iterator[Ledger]:
    with Ledger.open(home / "ledger.db") as opened:
        yield opened


def on_host(name: str, folder: Path, home: Path, copies: Copies | None = None) -> RunFolder:
    """The run folder as a worker of a host has it."""
    folder.mkdir(exist_ok=True)
    ledger = Ledger.open(home / "ledger.db")
    at_end(ledger.close)
    ledger.path = folder / "ledger.db"
    metrics = home / "metrics.jsonl"
    files = OwnFiles(
        ledger,
        name,
        lambda offset: metrics.read_bytes()[offset : offset + 5] if metrics.exists() else b"",
        copies,
    )
    return RunFolder(folder, placing=Placing(see=files.see, see_newest=files.see_newest))


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def checkpoint(folder: Path, step: int, text: str = "weights") -> Path:
    with Checkpoints(folder / "checkpoints").writing(step) as place:
        put(place / "deep/model", f"{text} {step}")
    return Checkpoints(folder / "checkpoints").folder(step)


def copied(address: Path, ledger: Ledger, folder: Path, *steps: int) -> Copies:
    """Copies of these checkpoints of a folder."""
    there = Address.of(str(address))
    copies = claim(there, there.text, "run", [""], None)
    for step in steps:
        made = Checkpoints(folder / "checkpoints").folder(step)
        Store(copies.at(there)).put(step, made, ledger.pack, lambda count: None, lambda: None)
    return copies


def test_a_return_forgets_who_had_the_files_of_steps_that_are_taken_back(ledger: Ledger) -> None:
    names = [f"rollouts/step-{step:06d}.arrow" for step in (4, 5)] + [
        "checkpoints/step-000005",
        "rollouts/eval-000008",
    ]
    for name in names:
        ledger.set_place(name, "c")
    ledger.set_place("rollouts/critic/step-000005.arrow", "c")
    assert ledger.least_return() is None
    ledger.roll_back_to(4, "trainer")
    assert list(ledger.places("")) == [
        "rollouts/critic/step-000005.arrow",
        names[3],
        names[0],
    ]
    ledger.roll_back_to(4, "trainer")
    assert ledger.least_return() == 4


def test_a_replaced_attempt_places_nothing_on_its_own_disk_that_counts(
    home: Path, ledger: Ledger
) -> None:
    handler = RequestHandler(ledger)
    old, new = Token("trainer-0", Life(1, 0), 7), Token("trainer-0", Life(1, 1), 8)
    put_in_place = METHODS["put_in_place"].call
    asks = put_in_place(".step-000003.old", STEP_3, None, "c")
    for token in (old, new):
        handler.hear(Join(token, 1))
    refused = handler.hear(Query(old, 2, 0, asks))
    assert isinstance(refused, Refused) and refused.error == Replaced.__name__
    assert ledger.places("") == {}
    assert isinstance(handler.hear(Query(new, 2, 0, asks)), QueryResult)
    assert ledger.places("") == {STEP_3: "c"} and not (home / STEP_3).exists()
    put(home / "written", "here")
    (home / "rollouts").mkdir()
    handler.hear(Query(new, 3, 0, put_in_place("written", STEP_3, None, HOME)))
    assert ledger.places("") == {STEP_3: HOME} and (home / STEP_3).read_text() == "here"


def test_rollouts_that_another_host_made_are_none_here_and_their_host_is_named(
    tmp_path: Path, home: Path, ledger: Ledger
) -> None:
    b = tmp_path / "b"
    put(b / STEP_3, "of a step that was taken back")
    for host, where in ((HOME, "in the scheduler's folder"), ("c", "on host 'c'")):
        ledger.set_place(STEP_3, host)
        with pytest.raises(RunFolderError, match=f"is not on this host, but {where}, and hosts"):
            on_host("b", b, home).rollouts_of().read(3)
    put(home / STEP_3, "of a step that was taken back")
    with pytest.raises(RunFolderError, match="is not on this host, but on host 'c'"):
        on_host(HOME, home, home).rollouts_of().read(3)


def test_metrics_are_those_of_the_schedulers_folder(tmp_path: Path, home: Path) -> None:
    folder = on_host("b", tmp_path / "b", home)
    assert folder.read_metrics() == []
    for step in (1, 2):
        put(home / "metrics.jsonl", json.dumps({"step": step}) + "\n")
        assert folder.read_metrics() == [{"step": step}]


def test_a_checkpoint_of_another_host_comes_from_its_copy_and_one_that_does_not_count_is_set_aside(
    tmp_path: Path, home: Path, ledger: Ledger
) -> None:
    b, c = tmp_path / "b", tmp_path / "c"
    for step in (2, 4, 6):
        checkpoint(c, step)
        ledger.set_place(f"checkpoints/step-{step:06d}", "c")
    copies = copied(tmp_path / "there", ledger, c, 2, 4)
    checkpoint(b, 5, "of a line that was taken back")
    folder = on_host("b", b, home, copies)
    assert folder.latest_checkpoint(at_most=7) == b / "checkpoints/step-000004"
    assert (b / "checkpoints/step-000004/deep/model").read_text() == "weights 4"
    assert (b / "checkpoints/not-counted-1-step-000005").exists()
    assert ledger.places("checkpoints/step-000004") == {"checkpoints/step-000004": "b"}
    assert folder.latest_checkpoint(at_most=7) == b / "checkpoints/step-000004"


def test_a_checkpoint_in_the_schedulers_folder_comes_from_its_copy_where_no_row_says_otherwise(
    tmp_path: Path, home: Path, ledger: Ledger
) -> None:
    b = tmp_path / "b"
    checkpoint(home, 2)
    copies = copied(tmp_path / "there", ledger, home, 2)
    assert on_host("b", b, home, copies).latest_checkpoint(8) == b / "checkpoints/step-000002"
    assert ledger.places("") == {"checkpoints/step-000002": "b"}


def test_what_is_here_is_gone_on_from_without_a_look_at_the_address(
    tmp_path: Path, home: Path, ledger: Ledger
) -> None:
    copies = Copies(address=str(tmp_path / "away"), run="run", part=1, token="t", trainers=("",))
    b = tmp_path / "b"
    checkpoint(b, 4)
    ledger.set_place("checkpoints/step-000004", "b")
    assert on_host("b", b, home, copies).latest_checkpoint(8) == b / "checkpoints/step-000004"
    checkpoint(home, 6)
    assert (
        on_host(HOME, home, home, copies).latest_checkpoint(8) == home / "checkpoints/step-000006"
    )


def test_a_run_whose_checkpoints_nobody_gives_does_not_go_on(
    tmp_path: Path, home: Path, ledger: Ledger
) -> None:
    ledger.set_place("checkpoints/step-000006", "c")
    with pytest.raises(RunError, match="the checkpoint of step 6 is on host 'c', and no copy is"):
        on_host("b", tmp_path / "b", home).latest_checkpoint(8)
    checkpoint(tmp_path / "b", 4)
    ledger.set_place("checkpoints/step-000004", "b")
    folder = on_host("b", tmp_path / "b", home)
    assert folder.latest_checkpoint(8) == tmp_path / "b/checkpoints/step-000004"


def test_a_run_that_always_had_one_folder_asks_nobody(home: Path) -> None:
    checkpoint(home, 4)
    folder = on_host(HOME, home, home)
    assert folder.latest_checkpoint() == home / "checkpoints/step-000004"
    with pytest.raises(RunFolderError, match="No such file"):
        folder.rollouts_of().read(3)
