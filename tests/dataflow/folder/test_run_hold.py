"""Who holds a run that several hosts see: exactly one, and who was replaced finds out before it
writes.
"""

import contextlib
import os
import shutil
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.examples import examples

from dataflow import Graph, inline, run
from dataflow.errors import Replaced
from dataflow.folder.ledger import Ledger, copying
from dataflow.folder.ledger import copying as renewal
from dataflow.folder.ledger.copying import renew
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.run_hold import (
    RAISE_S,
    STILL_S,
    RunHold,
    Taking,
    held,
    is_over_hosts,
    seen_in_part,
)
from dataflow.folder.run_lock import UnderWay
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer


class Clock:
    """Of all processes here, and each may be stopped."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Awake:
    """Of one process, as `AwakeClock`: it stands still while that is stopped."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._looked, self._away_s = clock, clock.now, 0.0

    def __call__(self) -> float:
        if self._clock.now - self._looked > 1.0:
            self._away_s += self._clock.now - self._looked
        self._looked = self._clock.now
        return self._looked - self._away_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def take(folder: Path, clock: Clock) -> RunHold:
    taking = Taking(folder, clock=clock, holders_clock=clock)
    while (hold := taking.look()) is None:
        clock.now += 0.5
    return hold


def test_the_first_takes_a_run_at_once_and_whoever_comes_while_it_lives_is_told_who_has_it(
    tmp_path: Path, clock: Clock
) -> None:
    hold = take(tmp_path, clock)
    assert (hold.number, clock.now) == (1, 0.0)
    other = Taking(tmp_path, clock=clock)
    with pytest.raises(UnderWay, match=rf"process {os.getpid()} on host '.+' runs it"):
        while True:
            clock.now += 0.25
            hold.check()
            assert other.look() is None
    assert clock.now <= 2 * RAISE_S


def test_a_run_that_was_let_go_of_is_taken_at_once(tmp_path: Path, clock: Clock) -> None:
    take(tmp_path, clock).release()
    assert take(tmp_path, clock).number == 2
    assert clock.now == 0.0


def test_a_run_whose_holder_has_died_is_taken_once_its_counter_has_stood_still(
    tmp_path: Path, clock: Clock
) -> None:
    take(tmp_path, clock).check()
    assert take(tmp_path, clock).number == 2
    assert STILL_S <= clock.now < STILL_S + 1


def test_a_holder_that_goes_on_after_it_was_replaced_finds_out_and_changes_nothing(
    tmp_path: Path, clock: Clock
) -> None:
    old = take(tmp_path, clock)
    old.check()
    new = take(tmp_path, clock)
    files = {path: path.read_bytes() for path in (tmp_path / "holders").iterdir()}
    for _ in range(2):
        with pytest.raises(
            Replaced, match="as number 1, but did not raise its counter for too long"
        ):
            old.check()
    old.release()
    assert {path: path.read_bytes() for path in (tmp_path / "holders").iterdir()} == files
    new.check()


def test_two_that_saw_the_counter_stand_still_at_once_do_not_both_take_it(
    tmp_path: Path, clock: Clock
) -> None:
    take(tmp_path, clock).check()
    both = [Taking(tmp_path, clock=clock, holders_clock=clock) for _ in range(2)]
    assert [each.look() for each in both] == [None, None]
    clock.now += STILL_S
    first = both[0].look()
    assert first is not None
    for late in (both[1].look, partial(both[1]._take, 1)):  # it looked before, or after
        with pytest.raises(UnderWay, match=f"process {os.getpid()} on host"):
            late()
    first.check()


def test_one_that_slept_while_the_run_changed_hands_twice_does_not_take_it(
    tmp_path: Path, clock: Clock
) -> None:
    """It was about to link a number that is free again."""
    take(tmp_path, clock).check()
    late = Taking(tmp_path, clock=clock)
    late.look()
    take(tmp_path, clock).release()
    last = take(tmp_path, clock)
    with pytest.raises(UnderWay):
        late._take(1)
    assert last.number == 3
    clock.now += 1
    last.check()
    assert sorted(path.name for path in (tmp_path / "holders").iterdir()) == ["000003"]


def test_a_process_that_was_stopped_while_it_waited_has_seen_nothing(
    tmp_path: Path, clock: Clock
) -> None:
    take(tmp_path, clock).check()
    taking = Taking(tmp_path, clock=Awake(clock))
    assert taking.look() is None
    clock.now += 100
    assert taking.look() is None


MOVES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0.1, 0.3, 1.0, 4.0])), min_size=20, max_size=120
)


@examples(60)
@given(moves=MOVES)
def test_no_two_ever_hold_a_run_whoever_is_stopped_for_however_long(
    moves: list[tuple[int, float]],
) -> None:
    """Four processes, one of which moves at a time; those that do not are stopped. Who may write
    has the highest number, and nobody else passes his check from then on.
    """
    folder, clock = Path(tempfile.mkdtemp()), Clock()
    taking: list[Taking | None] = [
        Taking(folder, clock=clock, holders_clock=clock, still_s=5.0) for _ in range(4)
    ]
    holds: list[RunHold | None] = [None] * 4
    highest = 0
    for who, seconds in moves:
        clock.now += seconds
        hold, looking = holds[who], taking[who]
        if hold is not None:
            try:
                hold.check()
                assert hold.number == highest
            except Replaced:
                assert hold.number < highest
                holds[who] = None
        elif looking is not None:
            with contextlib.suppress(UnderWay):
                if (hold := looking.look()) is None:
                    continue
                assert hold.number == highest + 1
                holds[who], highest = hold, hold.number
            taking[who] = Taking(folder, clock=clock, holders_clock=clock, still_s=5.0)
    shutil.rmtree(folder)


def test_a_run_is_held_for_a_block_and_let_go_of(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "t")
    assert not is_over_hosts(folder)
    for number in (1, 2):
        with held(folder) as hold:
            assert hold.number == number
            hold.check()
    assert is_over_hosts(folder)


def test_who_waits_whether_a_run_is_held_says_for_whom_and_how_long(
    tmp_path: Path, clock: Clock
) -> None:
    folder = RunFolder.create(tmp_path, "t")
    told: list[str] = []
    with held(folder, tell=told.append):
        pass
    take(folder.path, clock)  # and it dies
    with held(folder, still_s=0.05, sleep=lambda seconds: time.sleep(0.02), tell=told.append):
        pass
    (said,) = told
    assert f"was not let go of: waiting 0 s to see whether process {os.getpid()} on host '" in said


def test_a_ledger_that_another_host_writes_may_be_seen_in_part_only(
    tmp_path: Path, clock: Clock
) -> None:
    folder = RunFolder.create(tmp_path, "t")
    assert seen_in_part(folder) == ""
    hold = take(folder.path, clock)
    assert seen_in_part(folder) == "", "this host leads it"
    (file,) = (folder.path / "holders").iterdir()
    ours = file.read_bytes()
    file.write_bytes(b"7@elsewhere#ab 12")
    assert "host 'elsewhere' leads this run" in seen_in_part(folder)
    file.write_bytes(ours)
    hold.release()
    assert seen_in_part(folder) == ""


def test_a_run_that_another_host_may_hold_is_not_resumed_on_one_machine_while_it_lives(
    tmp_path: Path,
) -> None:
    g = Graph("tiny")
    FakeTrainer(prompts_per_step=2)(FakeGenerator()(g.source(FakePrompts())))
    folder = RunFolder.open(run(g, on=inline(), steps=2, runs=tmp_path, quiet=True).folder)
    over = threading.Event()
    with held(folder) as hold:

        def live() -> None:
            while not over.wait(0.05):
                hold.check()

        living = threading.Thread(target=live)
        living.start()
        try:
            with pytest.raises(UnderWay, match="on host"):
                run(g, on=inline(), steps=4, resume=folder.path, quiet=True)
        finally:
            over.set()
            living.join()
    assert run(g, on=inline(), steps=4, resume=folder.path, quiet=True).steps == 4


# The ledger's file


def groups(path: Path) -> int:
    with Ledger.open(path) as ledger:
        return ledger.next_group_id("prompts")


def test_what_a_replaced_holder_still_writes_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the ledger open, is in the midst of a transaction, and goes on."""
    folder = RunFolder.create(tmp_path, "t")
    Ledger.create(folder.ledger, {"trainer": ["prompts"]}).close()
    old = Ledger.open(folder.ledger)
    old.issue("prompts", [(0, "a")])
    with held(folder) as hold:
        old._db.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(hold, "release", lambda: None)  # it dies
    with held(folder, still_s=0.0):
        assert groups(folder.ledger) == 1
        with Ledger.open(folder.ledger) as new:
            new.issue("prompts", [(1, "b")])
            old._db.execute("COMMIT")
            old.issue("prompts", [(1, "other"), (2, "other")])
            old.close()
            assert [group.prompt_id for group in new.in_flight("prompts")] == ["a", "b"]
    assert groups(folder.ledger) == 2


@pytest.mark.parametrize(
    ("where", "left"), [("open", 0), ("unlink", 0), ("unlink", 1), ("replace", 0), ("replace", 1)]
)
def test_a_crash_while_a_ledger_is_put_in_a_new_file_loses_nothing(
    tmp_path: Path, where: str, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.db"
    before = Ledger.create(path, {"trainer": ["prompts"]})
    before.issue("prompts", [(0, "a"), (1, "b")])
    calls, real = iter(range(left)), getattr(Path, where, None)

    class Crash(BaseException):
        pass

    def fall(self: Path, *more: object, **named: object) -> object:
        if next(calls, None) is None:
            raise Crash
        return real(self, *more, **named) if real is not None else None

    with monkeypatch.context() as patch, pytest.raises(Crash):
        if where == "open":
            patch.setattr(copying, "connect", fall)
        else:
            patch.setattr(Path, where, fall)
        renew(path)
    renew(path)
    assert groups(path) == 2
    before.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ledger.db"]


def test_who_could_not_renew_the_ledger_leaves_that_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path, "t")
    with held(folder) as hold:
        monkeypatch.setattr(hold, "release", lambda: None)
    Ledger.create(folder.ledger, {"trainer": ["prompts"]}).close()
    old = folder.ledger.stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(renewal, "connect", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError), held(folder, still_s=0.0):
            pass
    with held(folder, still_s=0.0):
        assert folder.ledger.stat().st_ino != old


def test_where_there_is_no_ledger_nothing_is_renewed(tmp_path: Path) -> None:
    renew(tmp_path / "ledger.db")
    assert not list(tmp_path.iterdir())
