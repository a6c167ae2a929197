"""A ledger that one process has open for all: the newest attempt of a worker writes, each write is
made once.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zmq
from rigs.ending import at_end

from dataflow import Graph, verify
from dataflow.errors import DeadlineError, Replaced, RunError
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.ledger.copying import unpack
from dataflow.folder.ledger.methods import METHODS, Call
from dataflow.folder.ledger_service import files as files_module
from dataflow.folder.ledger_service.client import LedgerClient
from dataflow.folder.ledger_service.messages import (
    TO_LEDGER,
    Behind,
    Join,
    Query,
    QueryResult,
    Record,
    Recorded,
    Refused,
    Token,
    ToLedger,
)
from dataflow.folder.ledger_service.service import (
    Deferred,
    LedgerProcess,
    LedgerService,
    RequestHandler,
)
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.run_hold import held
from dataflow.history.describe import consumers, describe, graph_facts, plan_facts
from dataflow.runner import make_plan
from dataflow.runtime import RunSettings
from dataflow.scheduler.execute import InlineRun
from dataflow.system.files import RunFolderError
from dataflow.system.security import RunKeys
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.worker.host import Settings
from transport.life import Life

KEYS = RunKeys.make()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Ledger.create(tmp_path / "ledger.db", {"trainer": ["prompts"]}).close()
    return tmp_path / "ledger.db"


@pytest.fixture
def service(path: Path) -> Iterator[LedgerProcess]:
    with LedgerProcess(log=path.with_name("ledger.log")) as made:
        made.serve(path, "tcp://127.0.0.1:*", KEYS)
        yield made


def client(
    path: Path, service: LedgerProcess, worker: str = "trainer-0", **more: Any
) -> LedgerClient:
    made = LedgerClient(
        path, service.address, worker=worker, **{"keys": KEYS, "patience_s": 20.0, **more}
    )
    at_end(made.close)
    return made


def step(ledger: Any, number: int, trained: list[int]) -> None:
    ledger.commit_step(
        "trainer", number, version=number, source="prompts", trained=trained, metrics={"loss": 0.5}
    )


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_what_one_client_writes_another_one_reads(path: Path, service: LedgerProcess) -> None:
    prompts, trainer = client(path, service, "prompts-0"), client(path, service)
    prompts.issue("prompts", [(group, f"task-{group}") for group in range(4)])
    prompts.advance("prompts", [0, 1], "generating")
    assert [group.state for group in prompts.in_flight("prompts")] == ["generating"] * 2 + [
        "issued"
    ] * 2
    step(trainer, 1, [0, 1])
    assert trainer.steps("trainer")[0].metrics == {"loss": 0.5}
    assert (
        prompts.verdict("trainer")
        == "clean: 4 groups issued = 2 trained + 0 dropped + 2 in flight (2 issued)"
    )
    with pytest.raises(
        LedgerError,
        match="'trainer' would end group 1 of 'prompts' twice: it was trained at step 1",
    ):
        step(trainer, 2, [2, 1])
    step(trainer, 2, [2])
    assert (trainer.last_step("trainer"), trainer.next_group_id("prompts")) == (2, 4)
    trainer.flush()
    assert trainer.wal_bytes > 0
    with Ledger.open(path, readonly=True) as ledger:
        assert ledger.last_step("trainer") == 2


def test_an_error_of_what_was_posted_comes_with_the_next_call(
    path: Path, service: LedgerProcess
) -> None:
    scorer = client(path, service, "scorer-0")
    scorer.advance("prompts", [7], "scored")
    with pytest.raises(LedgerError, match=r"groups \[7\] of 'prompts' were never issued"):
        for _ in range(100):
            scorer.next_group_id("prompts")
    with pytest.raises(LedgerError, match="never issued"):
        scorer.issue("prompts", [(0, "a")])


def test_a_client_is_of_one_process_and_one_thread_but_for_flushes(
    path: Path, service: LedgerProcess
) -> None:
    trainer = client(path, service)
    found: list[object] = []

    def use() -> None:
        trainer.flush()
        with pytest.raises(LedgerError, match="open it anew in each"):
            trainer.last_step("trainer")
        found.append(trainer.wal_bytes)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(20)
    assert found and found[0]


@pytest.mark.slow
def test_what_is_written_while_the_service_falls_is_made_once(
    path: Path, service: LedgerProcess
) -> None:
    """Killed about when a commit comes, sooner or later each time; who is between it and the
    scheduler starts it.
    """
    trainer = client(path, service)
    trainer.issue("prompts", [(group, str(group)) for group in range(400)])

    def kill() -> None:
        for pid in children(service._process.pid):
            os.kill(pid, signal.SIGKILL)

    for number in range(1, 6):
        killer = threading.Timer(0.001 * number, kill)
        killer.start()
        step(trainer, number, [number])
        trainer.advance("prompts", [number + 100], "generated")
        killer.join()
    assert [each.trained for each in trainer.steps("trainer")] == [
        (number,) for number in range(1, 6)
    ]
    assert trainer.counts("trainer").in_flight["generated"] == 5
    service.check()


def test_a_service_that_is_stopped_is_waited_for_and_one_that_stays_away_is_told_of(
    path: Path, service: LedgerProcess
) -> None:
    trainer, hasty = client(path, service), client(path, service, "other-0", patience_s=0.5)
    (pid,) = children(service._process.pid)
    os.kill(pid, signal.SIGSTOP)
    resume = threading.Timer(1.5, os.kill, (pid, signal.SIGCONT))
    resume.start()
    try:
        with pytest.raises(
            DeadlineError,
            match=r"'other-0' waited 0 s for the ledger's service at .*: nobody answered",
        ):
            hasty.last_step("trainer")
        trainer.issue("prompts", [(0, "a")])
    finally:
        resume.join()
    assert trainer.next_group_id("prompts") == 1


def test_a_client_finds_the_service_that_a_successor_has_started(
    path: Path, service: LedgerProcess
) -> None:
    places = [service.address]
    trainer = client(path, service, seek=lambda: places[-1])
    trainer.issue("prompts", [(0, "a"), (1, "b")])
    service.close()
    trainer.advance("prompts", [0, 1], "generating")
    successor = LedgerProcess()
    at_end(successor.close)
    places.append(successor.serve(path, "tcp://127.0.0.1:*", KEYS))
    step(trainer, 1, [0, 1])
    assert trainer.last_step("trainer") == 1


def test_who_has_no_key_gets_no_answer(path: Path, service: LedgerProcess) -> None:
    for keys in (None, RunKeys.make()):
        with pytest.raises(DeadlineError, match="nobody answered"):
            LedgerClient(path, service.address, worker="trainer-0", keys=keys, patience_s=0.5)


def test_an_address_that_is_taken_is_told_of_at_the_start(
    path: Path, service: LedgerProcess
) -> None:
    with (
        LedgerProcess() as made,
        pytest.raises(RunError, match="cannot listen at .*: Address already in use"),
    ):
        made.serve(path, service.address, KEYS)


def test_a_signal_to_all_processes_of_a_run_is_for_the_scheduler(path: Path) -> None:
    """It ends its workers first, which still write."""
    with LedgerProcess() as service:
        trainer = (
            client(path, service, keys=None) if service.serve(path, "tcp://127.0.0.1:*") else None
        )
        pids = [service._process.pid, *children(service._process.pid)]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTSTP):
            for pid in pids:
                os.kill(pid, number)
        assert trainer is not None and trainer.last_step("trainer") == 0
        service.check()
    assert not any(alive(pid) for pid in pids)


def test_the_service_ends_with_the_scheduler(path: Path) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            made = LedgerProcess()
            made.serve(path, "tcp://127.0.0.1:*")
            os.write(writing, b"%d %d" % (made._process.pid, *children(made._process.pid)))
            time.sleep(30)
        finally:
            os._exit(0)
    supervisor, served = map(int, os.read(reading, 100).split())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 10
    while alive(supervisor) or alive(served):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# The handler alone


def call(name: str, *args: Any, **kwargs: Any) -> Call:
    return METHODS[name].message(args, kwargs)


def token(attempt: int = 0, session: int = 1, holder: int = 0, worker: str = "trainer-0") -> Token:
    return Token(worker, Life(holder, attempt), session)


@pytest.fixture
def handler(path: Path) -> Iterator[RequestHandler]:
    with Ledger.open(path) as ledger:
        made = RequestHandler(ledger)
        for each in (token(worker="prompts-0"), token()):
            made.hear(Join(each, 1))
        made.hear(
            Record(
                token(worker="prompts-0"),
                1,
                0,
                call("issue", "prompts", [(g, str(g)) for g in range(8)]),
            )
        )
        yield made


def commit(number: int, trained: list[int]) -> Call:
    return call("commit_step", "trainer", number, version=number, source="prompts", trained=trained)


def last(handler: RequestHandler, who: Token) -> object:
    said = handler.hear(Query(who, 5, 0, call("last_step", "trainer")))
    return said.value if isinstance(said, QueryResult) else said


def test_a_write_that_is_asked_for_again_is_made_once_and_is_no_conflict(
    handler: RequestHandler,
) -> None:
    record = Record(token(), 1, 0, commit(1, [0, 1]))
    assert [handler.hear(record) for _ in range(3)] == [Recorded(1)] * 3
    assert handler.hear(Record(token(), 2, 1, commit(2, [2]))) == Recorded(2)
    assert handler.hear(record) == Recorded(2)
    assert last(handler, token()) == 2


def test_a_write_that_was_made_before_the_service_fell_is_not_made_by_the_next_one(
    handler: RequestHandler, path: Path
) -> None:
    record = Record(token(), 1, 0, commit(1, [0, 1]))
    handler.hear(record)
    with Ledger.open(path) as again:
        assert RequestHandler(again).hear(record) == Recorded(1)
        assert again.last_step("trainer") == 1


def test_a_refusal_that_was_not_heard_is_told_again_though_it_would_be_made_now(
    handler: RequestHandler,
) -> None:
    too_early = Record(token(), 1, 0, commit(2, [0]))
    refused = handler.hear(too_early)
    assert isinstance(refused, Refused) and "commit step 1" in refused.message
    assert handler.hear(too_early) == refused
    assert handler.hear(Record(token(), 2, 1, commit(1, [1]))) == Recorded(2)
    assert handler.hear(too_early) == Recorded(2), (
        "its client has gone on, and hears nothing any more"
    )
    assert last(handler, token()) == 1


def test_what_is_said_again_of_an_earlier_write_hides_no_refusal_of_a_later_one(
    handler: RequestHandler,
) -> None:
    first, refused = Record(token(), 1, 0, commit(1, [0])), Record(token(), 2, 0, commit(9, [1]))
    for _ in range(2):
        assert handler.hear(first) == Recorded(1)
        assert isinstance(handler.hear(refused), Refused)


def test_writes_are_made_in_their_order_though_some_get_lost(handler: RequestHandler) -> None:
    assert handler.hear(Record(token(), 2, 0, commit(2, [1]))) == Behind(1)
    assert handler.hear(Query(token(), 9, 1, call("last_step", "trainer"))) == Behind(1)
    assert handler.hear(Record(token(), 1, 0, commit(1, [0]))) == Recorded(1)
    assert handler.hear(Record(token(), 2, 0, commit(2, [1]))) == Recorded(2)


def test_an_older_attempt_commits_nothing_once_a_newer_one_has_looked(
    handler: RequestHandler, path: Path
) -> None:
    assert handler.hear(Record(token(), 1, 0, commit(1, [0]))) == Recorded(1)
    newer = token(attempt=1, session=2)
    handler.hear(Join(newer, 1))
    assert last(handler, newer) == 1
    with Ledger.open(path) as again:
        for each in (handler, RequestHandler(again)):
            for late in (
                Record(token(), 2, 1, commit(2, [1])),
                Record(token(), 1, 0, commit(1, [0])),
                Join(token(), 3),
                Query(token(), 4, 0, call("last_step", "trainer")),
            ):
                said = each.hear(late)
                assert isinstance(said, Refused) and said.error == "Replaced", late
                assert "is attempt 0 of scheduler 0, and attempt 1" in said.message
        assert again.last_step("trainer") == 1
    assert handler.hear(Record(newer, 1, 0, commit(2, [1]))) == Recorded(1)


@pytest.mark.parametrize("newer", [token(session=2), token(holder=1), token(attempt=1)])
def test_of_a_worker_one_process_writes(handler: RequestHandler, newer: Token) -> None:
    handler.hear(Join(newer, 1))
    said = handler.hear(Record(token(), 1, 0, commit(1, [0])))
    assert isinstance(said, Refused) and said.error == "Replaced"


def test_workers_of_an_earlier_start_write_nothing_whatever_their_names(
    handler: RequestHandler, path: Path
) -> None:
    with Ledger.open(path) as again:
        RequestHandler(again, first=Life(1))
        resumed = RequestHandler(again)
        for late in (Record(token(), 1, 0, commit(1, [0])), Join(token(attempt=9), 1)):
            said = resumed.hear(late)
            assert isinstance(said, Refused) and said.error == "Replaced"
        assert resumed.hear(Join(token(holder=1), 1)) == QueryResult(1)


def test_a_service_whose_run_is_held_by_another_does_nothing(path: Path) -> None:
    held = [True]

    def holds() -> None:
        if not held[0]:
            raise Replaced("another one holds it")

    with Ledger.open(path) as ledger:
        handler = RequestHandler(ledger, holds=holds)
        handler.hear(Join(token(), 1))
        held[0] = False
        with pytest.raises(Replaced):
            handler.hear(Record(token(), 1, 0, call("issue", "prompts", [(0, "a")])))
        assert ledger.next_group_id("prompts") == 0


def test_what_is_waited_for_is_on_the_disk_before_it_is_answered(
    handler: RequestHandler, tmp_path: Path
) -> None:
    service = LedgerService(lambda: handler, f"ipc://{tmp_path}/socket", None)
    at_end(service.close)
    answered: list[bool] = []

    def turn(message: ToLedger) -> None:
        asking.send(TO_LEDGER.encode(message))
        service.turn({service._router: service._router.poll(5000)})
        assert asking.poll(5000)
        asking.recv()

    with (
        zmq.Context() as context,
        context.socket(zmq.DEALER) as asking,
        pytest.MonkeyPatch.context() as patch,
    ):
        asking.connect(service.address)
        patch.setattr(handler, "flush", lambda: answered.append(bool(asking.poll(50))))
        turn(Record(token(), 1, 0, commit(1, [0])))
        assert answered == [False]
        turn(Query(token(), 1, 1, call("last_step", "trainer")))
        turn(Record(token(), 2, 1, call("advance", "prompts", [1], "scored")))
        assert answered == [False], "nobody waits for these"
        turn(Join(token(attempt=1, session=9), 1))
        assert answered == [False, False]


def test_a_service_whose_run_was_taken_over_ends_and_the_scheduler_is_told(path: Path) -> None:
    with held(RunFolder.open(path.parent)) as hold, LedgerProcess(hold.check) as service:
        trainer = (
            client(path, service, keys=None, patience_s=0.5)
            if service.serve(path, "tcp://127.0.0.1:*")
            else None
        )
        service.check()
        (path.parent / "holders" / "000002").touch()
        deadline = time.monotonic() + 10
        with pytest.raises(Replaced, match="another one holds its run"):
            while time.monotonic() < deadline:
                service.check()
        assert trainer is not None
        with pytest.raises(DeadlineError):
            trainer.issue("prompts", [(0, "a")])


def test_who_was_replaced_puts_no_file_in_its_place(path: Path, service: LedgerProcess) -> None:
    folder = path.parent
    old = client(path, service)
    (folder / "rollouts").mkdir()
    at, mine = folder / "rollouts" / "step-1", old.placing.aside(folder / "rollouts" / "step-1")
    mine.write_text("old")
    client(path, service, life=Life(0, 1))
    with pytest.raises(Replaced, match="was replaced"):
        old.placing.place(mine, at, None)
    assert not at.exists()


def test_a_trainer_that_was_replaced_shows_neither_rollouts_nor_a_checkpoint(
    path: Path, service: LedgerProcess
) -> None:
    rows = pa.table({"group_id": [1]})
    old = RunFolder(path.parent, placing=client(path, service).placing)
    old.rollouts_of().write(1, rows)
    with old.checkpoints.writing(1) as begun:
        (begun / "weights").write_text("old")
    half = old.checkpoints.begin(2)
    (half / "weights").write_text("old")
    new = RunFolder(path.parent, placing=client(path, service, life=Life(0, 1)).placing)
    with new.checkpoints.writing(2) as begun:
        (begun / "weights").write_text("new")
        assert begun != half
    for late in (
        partial(old.rollouts_of().write, 1, pa.table({"group_id": [2]})),
        partial(old.checkpoints.commit, 2),
    ):
        with pytest.raises(Replaced):
            late()
    for folder in (new, RunFolder(path.parent)):
        assert folder.latest_checkpoint() == new.checkpoints.folder(2)
        assert (new.checkpoints.folder(2) / "weights").read_text() == "new"
        assert folder.rollouts_of().read(1)["group_id"].to_pylist() == [1]
    assert (half / "commit.json").exists(), "it was about to be shown"
    new.checkpoints.clear(3)
    assert not half.exists()


def test_a_run_whose_ledger_another_process_has_open_is_clean(tmp_path: Path) -> None:
    """All of it in one process, with files and entries by way of the service."""
    g = Graph("tiny")
    trainer = FakeTrainer(prompts_per_step=2)
    trainer(FakeGenerator()(g.source(FakePrompts())))
    plan = make_plan(g, steps=3, one_process=True)
    folder = RunFolder.create(tmp_path, "tiny")
    with Ledger.create(folder.ledger, consumers(g)) as ledger:
        describe(folder, ledger, graph_facts(g), {"seed": 0, "steps": 3, **plan_facts(g, plan)})
    made = LedgerProcess()
    at_end(made.close)
    made.serve(folder.ledger, f"ipc://{tmp_path}/ledger")
    told = Settings(folder=str(folder.path), run=RunSettings(steps=3), ledger=made.address)
    running = InlineRun(g, plan, told)
    assert isinstance(running.host.ledger, LedgerClient)
    running.start()
    running.run()
    running.close()
    made.close()
    verdict = verify(folder.path)
    assert verdict.clean, verdict.line
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3]
    assert [number for number, _ in folder.rollouts_of().files("step")] == [1, 2, 3]
    assert not list(folder.path.rglob("*.placing"))


def test_files_and_folders_are_put_in_place_once_and_stay_in_the_run_folder(
    path: Path, service: LedgerProcess
) -> None:
    folder, trainer = path.parent, client(path, service)
    for text in ("first", "second"):
        (folder / "made").mkdir()
        (folder / "made" / "weights").write_text(text)
        trainer.placing.place(folder / "made", folder / "kept", folder / "aside")
    trainer.placing.place(folder / "made", folder / "kept", folder / "aside")
    assert (folder / "kept" / "weights").read_text() == "second"
    with pytest.raises(RunFolderError, match="write it first"):
        trainer.placing.place(folder / "nothing", folder / "nowhere", None)
    with pytest.raises(RunFolderError, match="not in the run folder"):
        trainer.placing.place(folder / ".." / "x", folder / "y", None)


def test_noise_at_the_socket_is_refused_and_the_others_go_on(path: Path) -> None:
    service = LedgerProcess()
    at_end(service.close)
    service.serve(path, "tcp://127.0.0.1:*")
    with zmq.Context() as context, context.socket(zmq.DEALER) as noise:
        noise.connect(service.address)
        for _ in range(30):
            noise.send(os.urandom(50))
        trainer = client(path, service, keys=None)
        assert trainer.last_step("trainer") == 0


def test_a_client_has_a_copy_of_the_ledger_while_others_write(
    path: Path, service: LedgerProcess, tmp_path: Path
) -> None:
    prompts, trainer = client(path, service, "prompts-0"), client(path, service)
    prompts.issue("prompts", [(group, f"task-{group}") for group in range(4)])
    step(trainer, 1, [0, 1])
    packed: list[Path] = []
    thread = threading.Thread(target=lambda: packed.append(_packed(trainer, tmp_path / "copy")))
    thread.start()
    step(trainer, 2, [2, 3])
    thread.join(20.0)
    (tmp_path / "back").mkdir()
    assert unpack(packed[0], tmp_path / "back/ledger.db") in (1, 2)
    with Ledger.open(tmp_path / "back/ledger.db") as ledger:
        Ledger.prove(ledger.path)
        assert ledger.counts("trainer").missing == 0
        # nobody who wrote to the other one
        assert RequestHandler(ledger, first=Life(1))._writers.keys() == {""}
    assert sorted(each.name for each in path.parent.iterdir() if "copy" in each.name) == ["copy"]


def _packed(ledger: LedgerClient, into: Path) -> Path:
    ledger.pack(into)
    return into


def test_a_copy_that_is_asked_for_again_is_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger.open(path) as ledger:
        monkeypatch.setattr(files_module, "PACKED_BYTES", 100)
        handler, token = RequestHandler(ledger), Token("trainer-0", Life(0, 0), 1)
        at_end(handler.close)

        def ask(ticket: int, what: Any) -> Any:
            answer = handler.hear(Query(token, ticket, 0, what))
            assert isinstance(answer, Deferred)
            told = answer.answer()
            return told.value if isinstance(told, QueryResult) else told

        handler.hear(Join(token, 1))
        assert isinstance(ask(2, call("read_packed", "trainer-0", 0)), Refused)
        size = ask(3, call("pack", "trainer-0", 3))
        before = ask(4, call("read_packed", "trainer-0", 0))
        rest = ask(4, call("read_packed", "trainer-0", 100))
        assert len(before) == 100 and len(rest) == min(100, size - 100)
        ledger.issue("prompts", [(group, f"{group}" * 200) for group in range(40)])
        assert ask(3, call("pack", "trainer-0", 3)) == size, "its answer was late"
        assert ask(5, call("read_packed", "trainer-0", 0)) == before
        assert ask(6, call("pack", "trainer-0", 6)) != size
