"""Hosts that see no folder in common: who has what, and how others get it."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from rigs.ending import at_end

from dataflow.errors import Replaced
from dataflow.folder.checkpoints import Checkpoints
from dataflow.folder.disks import reading
from dataflow.folder.disks.bringing import Bringing
from dataflow.folder.disks.disks import Disks
from dataflow.folder.disks.fetching import HostPeer, fetch, listed
from dataflow.folder.disks.messages import (
    Answer,
    CannotRead,
    FileChunk,
    Listed,
    ListFiles,
    ReadFile,
)
from dataflow.folder.disks.reading import answer
from dataflow.folder.disks.server import FileServer
from dataflow.folder.ledger import Ledger
from dataflow.folder.ledger.places import HOME
from dataflow.folder.ledger.questions import LeastReturn, ListPlaces
from dataflow.folder.ledger.upkeep import AddPlace, SetPlace
from dataflow.folder.ledger.writers import Token
from dataflow.folder.ledger_service.handler import RequestHandler
from dataflow.folder.ledger_service.messages import Join, PutInPlace, Query, QueryResult, Refused
from dataflow.folder.placing import Placing
from dataflow.folder.run_folder import RunFolder
from dataflow.system.files import RunFolderError
from dataflow.system.security import RunKeys

KEYS = RunKeys.make()
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


def served(folder: Path) -> FileServer:
    made = FileServer(folder, "127.0.0.1", KEYS)
    at_end(made.close)
    return made


def peer(folder: Path, keys: RunKeys = KEYS, answer_s: float = 10.0) -> HostPeer:
    made = HostPeer("c", served(folder).address, keys, answer_s)
    at_end(made.close)
    return made


def host(name: str, folder: Path, home: Path, **others: Path) -> Disks:
    """What a host sees. others: hosts that give their folders."""
    folder.mkdir(exist_ok=True)
    ledger = Ledger.open(home / "ledger.db")
    at_end(ledger.close)
    ledger.path = folder / "ledger.db"
    addresses = {other: served(path).address for other, path in others.items()}
    return Disks(ledger, name, partial(answer, home), addresses, KEYS)


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def checkpoint(folder: Path, step: int, text: str = "weights") -> None:
    with Checkpoints(folder / "checkpoints").writing(step) as place:
        put(place / "deep/model", f"{text} {step}")


def test_a_return_forgets_who_had_the_files_of_steps_that_are_taken_back(ledger: Ledger) -> None:
    names = [f"rollouts/step-{step:06d}.arrow" for step in (4, 5)] + [
        "checkpoints/step-000005",
        "rollouts/eval-000008",
    ]
    for name in names:
        ledger.do(SetPlace(name, "c"))
    ledger.do(SetPlace("rollouts/critic/step-000005.arrow", "c"))
    assert ledger.do(LeastReturn()) is None
    ledger.roll_back_to(4, "trainer")
    assert list(ledger.do(ListPlaces(""))) == [
        "rollouts/critic/step-000005.arrow",
        names[3],
        names[0],
    ]
    ledger.roll_back_to(4, "trainer")
    assert ledger.do(LeastReturn()) == 4


def test_what_is_made_anew_is_on_its_host_alone_and_copies_are_added(ledger: Ledger) -> None:
    for what, want in (
        (SetPlace("a", "c"), ["c"]),
        (AddPlace("a", "b"), ["b", "c"]),
        (AddPlace("a", HOME), ["", "b", "c"]),
        (SetPlace("a", "b"), ["b"]),
        (SetPlace("a", HOME), None),
        (AddPlace("a", HOME), None),
        (AddPlace("a", "c"), ["", "c"]),
    ):
        ledger.do(what)
        assert ledger.do(ListPlaces("a")).get("a") == want


def test_a_replaced_attempt_places_nothing_on_its_own_disk_that_counts(
    home: Path, ledger: Ledger
) -> None:
    handler = RequestHandler(ledger)
    old, new = Token("trainer-0", 1, 0, 7), Token("trainer-0", 1, 1, 8)
    asks = PutInPlace(".step-000003.old", STEP_3, None, "c")
    for token in (old, new):
        handler.hear(Query(token, 1, 0, Join()))
    refused = handler.hear(Query(old, 2, 0, asks))
    assert isinstance(refused, Refused) and refused.error == Replaced.__name__
    assert ledger.do(ListPlaces("")) == {}
    assert isinstance(handler.hear(Query(new, 2, 0, asks)), QueryResult)
    assert ledger.do(ListPlaces("")) == {STEP_3: ["c"]} and not (home / STEP_3).exists()
    put(home / "written", "here")
    handler.hear(Query(new, 3, 0, PutInPlace("written", "rollouts-3", None)))
    put(home / "written", "here")
    (home / "rollouts").mkdir()
    handler.hear(Query(new, 4, 0, PutInPlace("written", STEP_3, None)))
    assert ledger.do(ListPlaces("")) == {} and (home / STEP_3).read_text() == "here"


@pytest.mark.parametrize(
    "path", ["ledger.db", "agents.keys", "../x", "/etc/passwd", "rollouts/../ledger.db", ""]
)
def test_a_host_gives_what_the_run_has_made_and_nothing_else(home: Path, path: str) -> None:
    for what in (ListFiles(path), ReadFile(path, 0)):
        found = answer(home, what)
        assert isinstance(found, CannotRead) and "none of the files that a host gives" in found.why


def test_files_travel_in_chunks_and_what_has_no_place_yet_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 5)
    here = tmp_path / "c"
    put(here / "rollouts/a", "hello world")
    put(here / "rollouts/empty", "")
    put(here / "rollouts/.b.3.placing", "half")
    of = peer(here)
    assert (
        listed(of, "rollouts") == {"rollouts/a": 11, "rollouts/empty": 0}
        and listed(of, "checkpoints") == {}
    )
    for name, text in (("a", "hello world"), ("empty", "")):
        fetch(of, f"rollouts/{name}", tmp_path / "got" / name)
        assert (tmp_path / "got" / name).read_text() == text
    with pytest.raises(RunFolderError, match="'rollouts/none' cannot be read there: No such file"):
        fetch(of, "rollouts/none", tmp_path / "got/none")
    assert not (tmp_path / "got/none").exists()


def test_a_file_that_is_written_anew_meanwhile_is_fetched_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 4)
    path = put(tmp_path / "rollouts/a", "old content")

    class Changes:
        asked = 0

        def ask(self, what: ListFiles | ReadFile) -> Answer:
            self.asked += 1
            if self.asked == 2:
                path.unlink()
                put(path, "new")
            return answer(tmp_path, what)

    fetch(Changes(), "rollouts/a", tmp_path / "got")
    assert (tmp_path / "got").read_text() == "new"


def test_a_file_that_is_replaced_while_a_chunk_is_read_is_not_taken_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 4)
    path, newer = (
        put(tmp_path / "rollouts/a", "old content"),
        put(tmp_path / "rollouts/b", "new content"),
    )
    opened = Path.open

    def replaced(self: Path, mode: str = "r") -> IO[Any]:
        file = opened(self, mode)
        if newer.exists():
            newer.rename(path)
        return file

    monkeypatch.setattr(Path, "open", replaced)
    read = ReadFile("rollouts/a", 0)
    old, new = answer(tmp_path, read), answer(tmp_path, read)
    assert isinstance(old, FileChunk) and isinstance(new, FileChunk)
    assert (old.data, new.data) == (b"old ", b"new ") and old.stamp != new.stamp


def test_a_name_that_no_file_can_have_is_answered_and_the_next_question_too(tmp_path: Path) -> None:
    put(tmp_path / "rollouts/a", "here")
    of = peer(tmp_path, answer_s=2.0)
    for what in (ListFiles("rollouts/\0"), ReadFile("rollouts/\0", 0)):
        assert isinstance(of.ask(what), Listed | CannotRead)
    assert listed(of, "rollouts") == {"rollouts/a": 4}


def test_other_keys_get_nothing_and_the_wait_ends(tmp_path: Path) -> None:
    put(tmp_path / "rollouts/a", "secret")
    with pytest.raises(RunFolderError, match=r"host 'c' has not answered within 0 s at tcp://127"):
        listed(peer(tmp_path, RunKeys.make(), 0.3), "rollouts")


def test_a_file_is_read_from_whoever_has_what_counts(
    tmp_path: Path, home: Path, ledger: Ledger
) -> None:
    b, c = tmp_path / "b", tmp_path / "c"
    put(c / STEP_3, "good")
    put(b / STEP_3, "of a step that was taken back")
    ledger.do(SetPlace(STEP_3, "c"))
    host("b", b, home, c=c).see(b / STEP_3)
    assert (b / STEP_3).read_text() == "good" and ledger.do(ListPlaces("")) == {STEP_3: ["b", "c"]}
    put(home / STEP_3, "of a step that was taken back")
    host(HOME, home, home, b=b).see(home / STEP_3)
    assert (home / STEP_3).read_text() == "good" and ledger.do(ListPlaces("")) == {
        STEP_3: ["", "b", "c"]
    }


def test_a_file_that_nobody_gives_is_named_with_its_host(
    tmp_path: Path, home: Path, ledger: Ledger
) -> None:
    ledger.do(SetPlace(STEP_3, "c"))
    with pytest.raises(
        RunFolderError,
        match=r"is not to be had: host 'c' has it and takes no part in the run; have",
    ):
        host("b", tmp_path / "b", home).see(tmp_path / "b" / STEP_3)


def test_metrics_are_those_of_the_schedulers_folder(tmp_path: Path, home: Path) -> None:
    b = tmp_path / "b"
    seen = host("b", b, home)
    folder = RunFolder(b, placing=Placing(see=seen.see))
    assert folder.read_metrics() == []
    put(home / "metrics.jsonl", json.dumps({"step": 1}) + "\n")
    assert folder.read_metrics() == [{"step": 1}]
    put(home / "metrics.jsonl", json.dumps({"step": 2}) + "\n")
    assert folder.read_metrics() == [{"step": 2}]


def test_the_newest_checkpoint_is_fetched_and_one_that_does_not_count_is_set_aside(
    tmp_path: Path, home: Path, ledger: Ledger
) -> None:
    b, c = tmp_path / "b", tmp_path / "c"
    for step in (2, 4, 6):
        checkpoint(c, step)
        ledger.do(SetPlace(f"checkpoints/step-{step:06d}", "c"))
    checkpoint(b, 5, "of a line that was taken back")
    (c / "checkpoints/step-000006/deep/model").write_text("torn")
    seen = host("b", b, home, c=c)
    folder = RunFolder(b, placing=Placing(see_newest=seen.see_newest))
    assert folder.latest_checkpoint(at_most=7) == b / "checkpoints/step-000004"
    assert (b / "checkpoints/step-000004/deep/model").read_text() == "weights 4"
    assert (b / "checkpoints/not-counted-1-step-000005").exists()
    assert ledger.do(ListPlaces("checkpoints/step-000004")) == {
        "checkpoints/step-000004": ["b", "c"]
    }
    assert folder.latest_checkpoint(at_most=3) == b / "checkpoints/step-000002"


def test_a_checkpoint_in_the_schedulers_folder_is_fetched_where_no_row_says_otherwise(
    tmp_path: Path, home: Path, ledger: Ledger
) -> None:
    b = tmp_path / "b"
    for step in (2, 4):
        checkpoint(home, step)
    ledger.do(SetPlace("checkpoints/step-000004", "c"))
    folder = RunFolder(b, placing=Placing(see_newest=host("b", b, home).see_newest))
    assert folder.latest_checkpoint() == b / "checkpoints/step-000002"


def test_a_run_that_always_had_one_folder_asks_nobody(home: Path) -> None:
    checkpoint(home, 4)
    seen = host(HOME, home, home)
    folder = RunFolder(home, placing=Placing(see=seen.see, see_newest=seen.see_newest))
    assert folder.latest_checkpoint() == home / "checkpoints/step-000004"
    seen.see(home / STEP_3)


@pytest.mark.parametrize("bound", [1 << 20, 8])
def test_at_the_end_what_is_cheap_comes_home_and_the_rest_is_told(
    tmp_path: Path, home: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    monkeypatch.setattr("dataflow.folder.disks.bringing.BRING_BYTES", bound)
    c = tmp_path / "c"
    put(c / "logs/t.log", "said")
    put(c / STEP_3, "rows")
    for step in (4, 6):
        checkpoint(c, step)
        ledger.do(SetPlace(f"checkpoints/step-{step:06d}", "c"))
    ledger.do(SetPlace(STEP_3, "c"))
    server = served(c)

    class Seeing(Ledger):
        @property
        def placing(self) -> Placing:
            seen = Disks(self, HOME, partial(answer, home), {"c": server.address}, KEYS)
            return Placing(see=seen.see, see_newest=seen.see_newest)

    with Seeing.open(home / "ledger.db") as opened:
        stays = Bringing(RunFolder(home), opened, {"c": server.address}, KEYS).bring({None: 8})
    assert (home / "logs/c/t.log").read_text() == "said" and (home / STEP_3).read_text() == "rows"
    if bound > 8:
        assert not stays and Checkpoints(home / "checkpoints").latest() == 6
        assert ledger.do(ListPlaces("checkpoints/step-000006")) == {
            "checkpoints/step-000006": ["", "c"]
        }
    else:
        assert stays.startswith(
            "1 of the files that hosts have made stay there, as 'checkpoints/step-000006'"
        )
