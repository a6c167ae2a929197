"""Copies of checkpoints at an address: whole or not there, whatever fails meanwhile, and nobody's
but their part's.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigs.ending import at_end
from rigs.machine import wait_until
from storage_addresses import Weather, failing

from dataflow.errors import GraphError, RunError
from dataflow.folder.checkpoints import MARKER, TEMPORARY, Checkpoints
from dataflow.folder.copies import process
from dataflow.folder.copies.copier import CheckpointCopier, CopyQueue
from dataflow.folder.copies.store import (
    LEDGER,
    Address,
    Copies,
    CopyError,
    Store,
    TakenUp,
    checked,
    choose,
    claim,
    claims,
    joined,
    parts,
)
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.system.child import fork

BYTES = 3000


class Log:
    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []

    def warning(self, event: str, **facts: Any) -> None:
        self.said.append((event, facts))

    info = warning


@pytest.fixture
def weather() -> Weather:
    return Weather()


@pytest.fixture
def address(tmp_path: Path, weather: Weather) -> Address:
    return failing(tmp_path / "there", weather)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    opened = Ledger.create(tmp_path / "ledger.db", {"trainer": ["prompts"]})
    at_end(opened.close)
    return opened


def commit(checkpoints: Checkpoints, step: int, *, temporary: bool = False) -> Path:
    with checkpoints.writing(step, **({TEMPORARY: True} if temporary else {})) as folder:
        (folder / "optimizer").mkdir()
        (folder / "model.bin").write_bytes(b"%d" % step * BYTES)
        (folder / "optimizer/shard.bin").write_bytes(b"m" * BYTES)
    return checkpoints.folder(step)


@pytest.fixture
def copier(
    address: Address, checkpoints: Checkpoints, ledger: Ledger
) -> Callable[..., CheckpointCopier]:
    def make(copies: Copies | None = None, last: int = 1000, **how: Any) -> CheckpointCopier:
        started = CheckpointCopier(
            copies or claim(address, address.text, "run", [""], None),
            trainer="",
            folder=checkpoints.folder,
            pack=ledger.pack,
            log=how.pop("log", Log()),
            node="trainer",
            open_address=lambda text: address,
            again_s=0.01,
            **how,
        )
        at_end(lambda: started.close(0.0))
        started.start(last)
        return started

    return make


def store(address: Address, part: int = 1) -> Store:
    return Store(address.below("run").below(f"part-{part:06d}"))


def idle(copier: CheckpointCopier) -> None:
    wait_until(lambda: copier.is_idle, 10.0, "the copies")


def test_the_newest_waits_before_the_others_and_a_temporary_one_only_while_it_is_the_newest() -> (
    None
):
    waiting = CopyQueue()
    for step, is_temporary in ((2, False), (3, True), (4, True), (6, False), (7, True)):
        waiting.add(step, is_temporary=is_temporary)
    taken = []
    while waiting.next:
        taken.append(waiting.take())
    assert taken == [(7, True), (6, False), (2, False)]
    waiting.add(9, is_temporary=True)
    waiting.put_back(8, is_temporary=True)
    waiting.put_back(5, is_temporary=False)
    assert [waiting.take(), waiting.take(), waiting.next] == [(9, True), (5, False), 0]


def test_the_marker_is_written_last_and_says_what_stands_there(
    address: Address,
    weather: Weather,
    checkpoints: Checkpoints,
    copier: Callable[..., CheckpointCopier],
    tmp_path: Path,
) -> None:
    commit(checkpoints, 5)
    made = copier()
    made.add(5, is_temporary=False)
    idle(made)
    names = [name.partition("step-000005/")[2] for name in weather.wrote if "step-" in name]
    assert names == ["model.bin", "optimizer/shard.bin", LEDGER, MARKER] and made.copied == 5
    store(address).get(5, tmp_path / "back")
    assert (tmp_path / "back/model.bin").read_bytes() == b"5" * BYTES
    (tmp_path / "there/run/part-000001/checkpoints/step-000005/model.bin").write_bytes(b"6" * BYTES)
    with pytest.raises(
        CopyError, match=r"'model.bin' of the checkpoint of step 5 at '.*' is damaged"
    ):
        store(address).get(5, tmp_path / "again")


@pytest.mark.parametrize("after", [0, BYTES - 1, BYTES, 2 * BYTES + 10])
def test_an_upload_that_is_cut_off_is_no_checkpoint_and_is_made_again(
    address: Address,
    weather: Weather,
    checkpoints: Checkpoints,
    copier: Callable[..., CheckpointCopier],
    after: int,
) -> None:
    commit(checkpoints, 4)
    made = copier()
    made.add(4, is_temporary=False)
    idle(made)
    commit(checkpoints, 6)
    weather.after_bytes = after
    made.add(6, is_temporary=False)
    wait_until(lambda: bool(made.error), 10.0, "a failure")
    assert store(address).whole() == [4]
    weather.after_bytes = None
    idle(made)
    assert store(address).whole() == [4, 6] and not made.error


def test_an_address_that_is_down_for_a_while_loses_nothing_and_is_told_of_once(
    address: Address,
    weather: Weather,
    checkpoints: Checkpoints,
    copier: Callable[..., CheckpointCopier],
) -> None:
    log = Log()
    made = copier(log=log)
    weather.down = True
    for step, temporary in ((2, False), (3, True), (4, False), (5, True), (6, True)):
        commit(checkpoints, step, temporary=temporary)
        made.add(step, is_temporary=temporary)
        checkpoints.clear(step, but=made.held)
    wait_until(lambda: made._fails > 2, 10.0, "some tries")
    assert not made.is_idle and "the network is down" in made.error
    weather.down = False
    idle(made)
    assert store(address).whole() == [2, 4, 6]
    assert [event for event, _ in log.said] == [
        "checkpoint not copied, and tried again; training goes on",
        "checkpoints are copied again",
    ]


def test_temporary_copies_go_with_the_next_and_what_is_copied_stays_in_the_folder_until_then(
    address: Address,
    weather: Weather,
    checkpoints: Checkpoints,
    copier: Callable[..., CheckpointCopier],
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    at_end(go_on.set)

    def hold(name: str) -> None:
        if "step-000001" in name:
            entered.set()
            assert go_on.wait(10.0)

    weather.before = hold
    commit(checkpoints, 1, temporary=True)
    made = copier()
    made.add(1, is_temporary=True)
    assert entered.wait(10.0)
    for step in (2, 3):
        commit(checkpoints, step, temporary=True)
        made.add(step, is_temporary=True)
        checkpoints.clear(step, but=made.held)
    assert checkpoints.steps() == [1, 3]
    go_on.set()
    idle(made)
    assert store(address).steps() == [3]
    checkpoints.keep(3)
    made.add(3, is_temporary=False)
    idle(made)
    assert TEMPORARY not in store(address).marker(3)
    assert sum("step-000003/model.bin" in name for name in weather.wrote) == 1
    assert not any("step-000002" in name for name in weather.wrote)


def test_a_checkpoint_that_was_taken_back_leaves_the_address_before_another_has_its_number(
    address: Address, checkpoints: Checkpoints, copier: Callable[..., CheckpointCopier]
) -> None:
    copies = claim(address, address.text, "run", [""], None)
    for step in (2, 8):
        commit(checkpoints, step)
        first = copier(copies)
        first.add(step, is_temporary=False)
        idle(first)
    again = copier(copies, last=4)
    again.add(2, is_temporary=False)
    idle(again)
    assert store(address).steps() == [2]


def test_who_finds_a_newer_part_copies_nothing_more(
    address: Address, checkpoints: Checkpoints, copier: Callable[..., CheckpointCopier]
) -> None:
    made = copier()
    commit(checkpoints, 2)
    made.add(2, is_temporary=False)
    idle(made)
    claim(address, address.text, "run", [""], 1)
    commit(checkpoints, 3)
    made.add(3, is_temporary=False)
    idle(made)
    assert isinstance(made.ended, TakenUp) and store(address).whole() == [2]


def test_a_part_clears_those_before_it_once_a_run_could_go_on_from_it(
    address: Address, checkpoints: Checkpoints, copier: Callable[..., CheckpointCopier]
) -> None:
    first = copier()
    for step, temporary in ((2, False), (3, True)):
        commit(checkpoints, step, temporary=temporary)
        first.add(step, is_temporary=temporary)
        idle(first)
    second = copier(claim(address, address.text, "run", [""], 1))
    assert store(address, 1).whole() == [2, 3]
    second.add(3, is_temporary=True)
    idle(second)
    assert store(address, 1).whole() == [2] and store(address, 2).whole() == [3]


def test_a_claim_that_is_withdrawn_while_another_looks_is_none(
    address: Address, weather: Weather
) -> None:
    claim(address, address.text, "run", [""], None)
    run = address.below("run")
    run.put_json("part-000002/claim-other.json", {})
    weather.before_read = lambda name: run.remove("part-000002/claim-other.json")
    assert claims(run, 2) == {"other": {}}
    assert claims(run, 2) == {}
    run.remove("part-000002/claim-other.json")


def test_who_cannot_see_whether_others_claim_a_part_withdraws(
    address: Address, weather: Weather
) -> None:
    first = claim(address, address.text, "run", [""], None)

    def fail() -> None:
        if any("part-000002" in name for name in weather.wrote):
            raise OSError("the network is down")

    weather.before_list = fail
    with pytest.raises(CopyError, match="the network is down"):
        claim(address, address.text, "run", [""], 1)
    weather.before_list = lambda: None
    first.check(address)  # it was taken up by nobody


def test_of_several_that_claim_a_part_at_once_one_has_it_at_most(
    address: Address, weather: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = claim(address, address.text, "run", [""], None)
    met = threading.Barrier(3)
    put_json = Address.put_json

    def together(self: Address, name: str, value: Any) -> None:
        met.wait(10.0)
        put_json(self, name, value)

    monkeypatch.setattr(Address, "put_json", together)
    outcomes: list[object] = []

    def take() -> None:
        try:
            outcomes.append(claim(address, address.text, "run", [""], 1))
        except RunError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert sum(isinstance(outcome, Copies) for outcome in outcomes) <= 1 and len(outcomes) == 3
    assert parts(address.below("run")) == [1, 2]
    if not any(isinstance(outcome, Copies) for outcome in outcomes):
        first.check(address)  # it was taken up by nobody
    with pytest.raises(RunError, match="was taken up by another process at this moment"):
        claim(address, address.text, "run", [""], 1)


@pytest.mark.parametrize(
    ("whole", "wanted"),
    [
        ({}, 0),
        ({1: {"": []}}, 0),
        ({1: {"": [4]}, 2: {"": []}}, 1),
        ({1: {"": [4]}, 2: {"": [4, 6]}}, 2),
        ({1: {"a": [4], "b": [4]}, 2: {"a": [6], "b": []}}, 1),
        ({1: {"a": [4], "b": []}, 2: {"a": [6], "b": []}}, 2),
    ],
)
def test_a_run_goes_on_from_the_newest_part_that_all_trainers_can_go_on_from(
    whole: dict[int, dict[str, list[int]]], wanted: int
) -> None:
    assert choose(whole) == wanted


def test_a_copier_that_is_closed_stops_in_the_midst_of_a_copy(
    address: Address,
    weather: Weather,
    checkpoints: Checkpoints,
    copier: Callable[..., CheckpointCopier],
) -> None:
    commit(checkpoints, 2)
    weather.before = lambda name: time.sleep(0.05) if "step" in name else None
    made = copier()
    made.add(2, is_temporary=False)
    wait_until(lambda: made.under_way == 2, 10.0, "the copy")
    made.close(0.0)
    assert store(address).whole() == []


def test_a_ledger_that_cannot_be_packed_makes_no_copy(
    address: Address, checkpoints: Checkpoints, copier: Callable[..., CheckpointCopier]
) -> None:
    made = copier()

    def refuse(into: Path) -> None:
        raise LedgerError("no")

    pack, made._pack = made._pack, refuse
    commit(checkpoints, 2)
    made.add(2, is_temporary=False)
    wait_until(lambda: made.error == "no", 10.0, "the refusal")
    assert store(address).whole() == []
    made._pack = pack
    idle(made)
    assert store(address).whole() == [2]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("/there/", "/there"),
        ("file:///there/a/", "/there/a"),
        ("file:///there/a%20b", "/there/a b"),
        ("/there/a?b", "/there/a?b"),
        ("s3://bucket/a/?region=x", "s3://bucket/a?region=x"),
        ("gs://bucket/a", "gs://bucket/a"),
    ],
)
def test_an_address_is_the_same_however_it_is_given(text: str, wanted: str) -> None:
    assert checked(text) == wanted == checked(wanted)


def test_what_follows_a_question_mark_stays_at_the_end_of_an_address() -> None:
    assert joined("s3://bucket/a?region=x", "run") == "s3://bucket/a/run?region=x"
    assert joined("/there/a?b", "run") == "/there/a?b/run"
    assert joined("/there/", "run") == "/there/run" and joined("/there", "") == "/there"


def test_a_host_that_dies_in_the_midst_of_a_copy_leaves_the_one_before(
    address: Address,
    weather: Weather,
    checkpoints: Checkpoints,
    ledger: Ledger,
    copier: Callable[..., CheckpointCopier],
) -> None:
    copies = claim(address, address.text, "run", [""], None)
    for step in (2, 3):
        commit(checkpoints, step)
    first = copier(copies)
    first.add(2, is_temporary=False)
    idle(first)
    first.close(0.0)

    def upload() -> int:
        weather.before = lambda name: time.sleep(60) if "step-000003/optimizer" in name else None
        store(address).put(3, checkpoints.folder(3), ledger.pack, lambda count: None, lambda: None)
        return 0

    dying = fork(upload)
    wait_until(lambda: 3 in store(address).steps(), 10.0, "the copy to begin")
    dying.kill()
    dying.wait(10.0)
    assert store(address).whole() == [2] and store(address).steps() == [2, 3]
    again = copier(copies)
    again.add(3, is_temporary=True)
    idle(again)
    assert store(address).whole() == [2, 3]


def test_a_copy_whose_bytes_stop_coming_ends_in_a_refusal_and_those_that_come_are_told_of(
    checkpoints: Checkpoints,
    ledger: Ledger,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = tmp_path / "there"
    copies = claim(Address.of(str(there)), str(there), "run", [""], None)
    commit(checkpoints, 4)
    copying = CheckpointCopier(
        copies,
        trainer="",
        folder=checkpoints.folder,
        pack=ledger.pack,
        log=Log(),
        node="trainer",
    )
    at_end(lambda: copying.close(0.0))
    copying.start(4)
    copying.add(4, is_temporary=False)
    idle(copying)
    stuck = next(there.rglob("step-000004/model.bin"))
    into = tmp_path / "into"
    (into / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(process, "MOVES_S", -1.0)
    copy = process.asdict(process.find(copies.place))
    process.TASKS["bring"](str(there), found=copy, trainer="", steps=[4], folder=str(into))
    assert set(capsys.readouterr().out.splitlines()) == {process.MOVES.decode().strip()}
    stuck.unlink()
    os.mkfifo(stuck)
    monkeypatch.setattr(process, "STILL_S", 3.0)
    with pytest.raises(GraphError, match="did not answer within 3 s"):
        process.bring_checkpoint(copies, "", into, 0, 4, lambda text: None)


def test_who_says_that_bytes_come_is_waited_for_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def speaks(lines: list[bytes]) -> None:
        def body(stdout: int) -> int:
            for line in lines:
                os.write(stdout, line)
                time.sleep(0.3)
            return 0

        monkeypatch.setattr(
            process, "program", lambda *words, stdin, stdout: fork(lambda: body(stdout))
        )

    speaks([b"begun\n", *[process.MOVES] * 5, b'{"value": 3}\n'])
    assert process.ask("bring", "there", within_s=1.0) == 3
    speaks([b"begun\n", b"", b"", b"", b"", b"", b'{"value": 3}\n'])
    with pytest.raises(GraphError, match="did not answer within 1 s"):
        process.ask("bring", "there", within_s=1.0)
