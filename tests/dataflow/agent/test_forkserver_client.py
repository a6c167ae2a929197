"""The forkserver: workers inherit what the scheduler has in memory, and none outlives it."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataflow.agent.forkserver import Forkserver
from dataflow.agent.forkserver_client import ForkserverClient, TakenOverForkserver
from dataflow.agent.messages import CODEC, Alive, Notice, Stay, TakenAway
from dataflow.errors import Replaced, RunError
from dataflow.system.child import Child
from dataflow.system.messages import Channel


def wait_until(holds: Callable[[], bool], deadline_s: float = 10.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Events:
    def __init__(self, client: ForkserverClient) -> None:
        self.client, self.seen = client, []

    def find(self, event: str) -> dict:
        def there() -> bool:
            self.seen += self.client.events()
            return any(each["event"] == event for each in self.seen)

        wait_until(there)
        return next(each for each in self.seen if each["event"] == event)


def test_a_worker_gets_the_callers_objects_without_pickling(tmp_path: Path) -> None:
    secret = {"function": lambda x: x + 1}

    def main(settings: dict) -> int:
        (tmp_path / "out").write_text(str(secret["function"](settings["x"])))
        return 7

    client = ForkserverClient(main, {}, lambda: None)
    try:
        client.spawn("a", {"x": 41}, heavy=False)
        exited = Events(client).find("exited")
        assert (exited["name"], exited["status"]) == ("a", 7)
        assert (tmp_path / "out").read_text() == "42"
    finally:
        client.close()


def test_heavy_workers_find_the_preloaded_modules_and_light_ones_do_not_wait_for_them(
    tmp_path: Path,
) -> None:
    def main(settings: dict) -> int:
        (tmp_path / settings["name"]).touch()
        return int(os.environ.get("PRELOADED", "0"))

    def preload() -> None:
        wait_until((tmp_path / "light").exists)
        os.environ["PRELOADED"] = "3"

    client = ForkserverClient(main, {}, preload)
    try:
        for name in ("light", "heavy"):
            client.spawn(name, {"name": name}, heavy=name == "heavy")
        events = Events(client)
        wait_until(
            lambda: (
                events.seen.extend(client.events())
                or len([e for e in events.seen if e["event"] == "exited"]) == 2
            )
        )
        assert {e["name"]: e["status"] for e in events.seen if e["event"] == "exited"} == {
            "light": 0,
            "heavy": 3,
        }
    finally:
        client.close()


def test_a_killed_worker_is_reported_with_its_signal() -> None:
    client = ForkserverClient(lambda settings: time.sleep(60) or 0, {}, lambda: None)
    try:
        client.spawn("a", {}, heavy=False)
        events = Events(client)
        events.find("started")
        client.kill("a", signal.SIGKILL)
        assert events.find("exited")["status"] == -signal.SIGKILL
    finally:
        client.close()


def test_it_tells_of_a_worker_that_is_stopped_and_of_its_going_on_each_once() -> None:
    client = ForkserverClient(lambda settings: time.sleep(60) or 0, {}, lambda: None)
    try:
        client.spawn("a", {}, heavy=False)
        events = Events(client)
        pid = events.find("started")["pid"]
        for number, told in (
            (signal.SIGSTOP, "stopped"),
            (signal.SIGCONT, "continued"),
            (signal.SIGKILL, "exited"),
        ):
            os.kill(pid, number)
            assert events.find(told)["name"] == "a"
        assert [event["event"] for event in events.seen] == [
            "started",
            "stopped",
            "continued",
            "exited",
        ]
    finally:
        client.close()


def test_what_a_worker_started_is_killed_when_it_has_ended_and_before_that_is_told(
    tmp_path: Path,
) -> None:
    def main(settings: dict) -> int:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        (tmp_path / "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    client = ForkserverClient(main, {}, lambda: None)
    try:
        client.spawn("a", {}, heavy=False)
        assert Events(client).find("exited")["status"] == -signal.SIGKILL
        child = int((tmp_path / "child").read_text())
        wait_until(lambda: not alive(child), deadline_s=5.0)
    finally:
        client.close()


def test_no_worker_outlives_the_scheduler(tmp_path: Path) -> None:
    """A scheduler in a process of its own is killed; its forkserver and its worker end by
    themselves.
    """
    scheduler = os.fork()
    if scheduler == 0:
        client = ForkserverClient(lambda settings: time.sleep(60) or 0, {}, lambda: None)
        client.spawn("a", {}, heavy=False)
        pid = Events(client).find("started")["pid"]
        (tmp_path / "pids.part").write_text(f"{client.pid} {pid}")
        (tmp_path / "pids.part").rename(tmp_path / "pids")
        time.sleep(60)
        os._exit(0)
    wait_until((tmp_path / "pids").exists)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(alive(pid) for pid in pids)
    os.kill(scheduler, signal.SIGKILL)
    os.waitpid(scheduler, 0)
    wait_until(lambda: not any(alive(pid) for pid in pids), deadline_s=5.0)


def test_closing_ends_a_worker_that_does_not_listen() -> None:
    def deaf(settings: dict) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        return 0

    client = ForkserverClient(deaf, {}, lambda: None)
    client.spawn("a", {}, heavy=False)
    pid = Events(client).find("started")["pid"]
    client.close()
    wait_until(lambda: not alive(pid))
    with pytest.raises(RunError, match="forkserver .* is gone.*start the run again"):
        client.spawn("b", {}, heavy=False)


_STOPPED: list[int] = []


"""Schedulers that a test has stopped, and that nobody else ends; each leads a group with its
forkserver."""


@pytest.fixture(autouse=True)
def nobody_stays_stopped() -> Iterator[None]:
    yield
    while _STOPPED:
        os.killpg(_STOPPED[-1], signal.SIGKILL)
        os.waitpid(_STOPPED.pop(), 0)


def left_behind(
    tmp_path: Path,
    stay_s: float,
    end_s: float = 30.0,
    keeps: bool = False,
    number: int = signal.SIGKILL,
    silent_s: float = 30.0,
    is_stopped: bool = False,
    **more: object,
) -> list[int]:
    """Numbers of a forkserver and two workers whose scheduler got a signal after it had let them
    stay. is_stopped: the forkserver stands still since before that.
    """
    scheduler = os.fork()
    if scheduler == 0:
        os.setpgid(0, 0)
        client = ForkserverClient(
            lambda settings: time.sleep(settings["s"]) or 5,
            {},
            lambda: None,
            takeover=str(tmp_path / "takeover"),
            **more,
        )
        pids = []
        for name, seconds in (("a", 60), ("b", 0.5)):
            client.spawn(name, {"s": seconds}, heavy=False, keeps=keeps and name == "b")
        events = Events(client)
        wait_until(lambda: events.seen.extend(client.events()) or len(events.seen) >= 2)
        pids = [each["pid"] for each in events.seen]
        if is_stopped:
            os.kill(client.pid, signal.SIGSTOP)
        client.stay(stay_s, end_s, silent_s)
        (tmp_path / "pids.part").write_text(" ".join(map(str, [client.pid, *pids])))
        (tmp_path / "pids.part").rename(tmp_path / "pids")
        time.sleep(60)
        os._exit(0)
    wait_until((tmp_path / "pids").exists)
    os.kill(scheduler, number)
    if os.WIFSTOPPED(os.waitpid(scheduler, os.WUNTRACED)[1]):
        _STOPPED.append(scheduler)
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def test_a_successor_gets_every_worker_as_it_is_and_may_use_them(tmp_path: Path) -> None:
    forkserver, sleeper, short = left_behind(tmp_path, 30.0)
    wait_until(lambda: not alive(short))
    taken = TakenOverForkserver(str(tmp_path / "takeover"))
    assert taken.pid == forkserver and 0 < taken.alone_s < 10
    assert [
        (e["name"], e["pid"], e["alive"], e["status"], e["settings"]) for e in taken.handed
    ] == [
        ("a", sleeper, True, None, {"s": 60}),
        ("b", short, False, 5, {"s": 0.5}),
    ]
    taken.spawn("b", {"s": 0}, heavy=True)
    events = Events(taken)
    assert events.find("exited")["status"] == 5
    taken.kill("a")
    wait_until(lambda: not alive(sleeper))
    taken.close()
    wait_until(lambda: not alive(forkserver))


def test_what_a_scheduler_sent_just_before_it_died_counts(tmp_path: Path) -> None:
    forkserver, _, _ = left_behind(tmp_path, 30.0, is_stopped=True)
    os.kill(forkserver, signal.SIGCONT)
    taken = TakenOverForkserver(str(tmp_path / "takeover"))
    assert [each["alive"] for each in taken.handed if each["name"] == "a"] == [True]
    taken.close()
    wait_until(lambda: not alive(forkserver))


def test_a_successor_hears_of_a_worker_that_was_stopped_while_there_was_no_scheduler(
    tmp_path: Path,
) -> None:
    _, sleeper, _ = left_behind(tmp_path, 30.0)
    os.kill(sleeper, signal.SIGSTOP)
    time.sleep(0.3)  # the forkserver looks several times, and has nobody to tell
    taken = TakenOverForkserver(str(tmp_path / "takeover"))
    try:
        assert Events(taken).find("stopped")["pid"] == sleeper
    finally:
        taken.close()


def test_workers_whose_scheduler_nobody_replaces_end_after_the_limit(tmp_path: Path) -> None:
    pids = left_behind(tmp_path, 0.4)
    assert alive(pids[1])
    wait_until(lambda: not any(map(alive, pids)), deadline_s=5.0)
    with pytest.raises(RunError, match="nobody keeps workers"):
        TakenOverForkserver(str(tmp_path / "takeover"))


def test_after_the_limit_workers_that_others_wait_for_have_time_to_end(tmp_path: Path) -> None:
    forkserver, sleeper, short = left_behind(tmp_path, 0.1, 30.0, keeps=True)
    wait_until(lambda: not alive(short))
    wait_until(lambda: not alive(sleeper) and not alive(forkserver), deadline_s=5.0)


def test_a_successor_that_is_forked_is_replaced_when_it_ends_and_not_for_ever(
    tmp_path: Path,
) -> None:
    def succeed() -> int:
        with (tmp_path / "tries").open("a") as tries:
            tries.write("x")
        return 1

    pids = left_behind(tmp_path, 3.0, standby=succeed)
    wait_until(lambda: not any(map(alive, pids)), deadline_s=20.0)
    assert (tmp_path / "tries").read_text() == "xxx"


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def test_a_pause_lets_workers_and_what_they_started_stand_still_and_is_no_news(
    tmp_path: Path,
) -> None:
    def main(settings: dict) -> int:
        child = os.fork()
        if child:
            (tmp_path / settings["name"]).write_text(str(child))
        time.sleep(60)
        os._exit(0)

    client = ForkserverClient(main, {}, lambda: None)
    try:
        for name in ("a", "b"):
            client.spawn(name, {"name": name}, heavy=False)
        files = [tmp_path / name for name in ("a", "b")]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        events = Events(client)
        events.find("started")
        wait_until(lambda: events.seen.extend(client.events()) or len(events.seen) == 2)
        everyone = [
            *(event["pid"] for event in events.seen),
            *(int(file.read_text()) for file in files),
        ]
        os.kill(everyone[0], signal.SIGSTOP)
        assert events.find("stopped")["pid"] == everyone[0]
        for _ in range(2):
            client.pause(True)
            wait_until(lambda: all(map(is_stopped, everyone)))
            client.pause(False)
            wait_until(lambda: not any(map(is_stopped, everyone)))
        os.kill(everyone[1], signal.SIGKILL)
        events.find("exited")
        told = [
            (event["event"], event["pid"]) for event in events.seen if event["event"] != "started"
        ]
        assert told == [
            ("stopped", everyone[0]),
            ("continued", everyone[0]),
            ("exited", everyone[1]),
        ]
    finally:
        client.close()


def took_over(tmp_path: Path) -> Callable[[], int]:
    """What the next scheduler runs: it takes the workers, says so, and gives signs of life."""

    def succeed() -> int:
        taken = TakenOverForkserver(str(tmp_path / "takeover"))
        (tmp_path / f"taken-{taken.number}").write_text(
            f"{os.getpid()} {taken.lives} {len(taken.handed)}"
        )
        for _ in range(6_000):
            taken.live()
            time.sleep(0.01)
        return 0

    return succeed


def read(path: Path) -> list[str]:
    wait_until(lambda: path.exists() and bool(path.read_text()), 20.0)
    return path.read_text().split()


def test_a_scheduler_that_is_stopped_is_replaced_where_there_is_a_successor_and_so_is_that_one(
    tmp_path: Path,
) -> None:
    pids = left_behind(
        tmp_path, 60.0, number=signal.SIGSTOP, silent_s=0.2, standby=took_over(tmp_path)
    )
    first, lives, workers = read(tmp_path / "taken-1")
    assert (lives, workers) == ("True", "2") and all(alive(pid) for pid in pids[:2])
    os.kill(int(first), signal.SIGSTOP)
    assert read(tmp_path / "taken-2")[1:] == ["True", "2"]
    os.kill(int(first), signal.SIGKILL)
    os.kill(int(read(tmp_path / "taken-2")[0]), signal.SIGKILL)
    assert read(tmp_path / "taken-3")[1:] == ["False", "2"]
    os.kill(int(read(tmp_path / "taken-3")[0]), signal.SIGKILL)

    def ended() -> bool:
        """It heeds SIGTERM once it has seen that its scheduler has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGTERM)
        return not any(map(alive, pids))

    wait_until(ended)


@pytest.mark.parametrize(
    ("paused", "stays", "has_successor"),
    [(True, True, True), (False, False, True), (False, True, False)],
)
def test_nobody_replaces_a_scheduler_that_is_paused_or_has_not_begun_or_has_no_successor(
    paused: bool, stays: bool, has_successor: bool
) -> None:
    """The clock is the test's: years go by."""
    now = [0.0]
    ours, theirs = (Channel(each, CODEC, 5.0) for each in socket.socketpair())
    takeover = socket.socket(socket.AF_UNIX)
    server = Forkserver(
        theirs,
        takeover,
        lambda settings: 0,
        lambda: None,
        lambda: None,
        (lambda: 0) if has_successor else None,
        clock=lambda: now[0],
    )
    if stays:
        server._apply(Stay(60.0, 60.0, 30.0))
    server._pause(paused)

    def hours_pass() -> None:
        for _ in range(4_000):
            now[0] += 0.9
            if server.control is not None:
                assert not server._listen(0.0)

    hours_pass()
    assert server.control is theirs
    if paused:
        server._pause(False)
        ours.send(Alive())
        assert server._listen(0.0)
        assert not server._listen(0.0) and server.control is theirs, (
            "what it was paused is no silence"
        )
        hours_pass()
        assert server.control is None and ours.receive(5.0) == TakenAway()
    for each in (ours, theirs, takeover):
        each.close()


def test_a_scheduler_that_was_replaced_hears_of_nothing_else_any_more(tmp_path: Path) -> None:
    ours, theirs = (Channel(each, CODEC, 5.0) for each in socket.socketpair())
    client = object.__new__(ForkserverClient)
    client._hold(ours, Child(os.getpid()))
    for message in (Notice("exited", "a", 1, 0), TakenAway()):
        theirs.send(message)
    theirs.close()
    for touch in (
        client.events,
        client.events,
        lambda: client.kill("a"),
        lambda: client.close(5.0),
    ):
        with pytest.raises(Replaced, match="its standby has taken the run over"):
            touch()
    client.leave()
