"""Mutated frames into a live receiver: no crash, nothing taken that was not sent, memory flat."""

import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from transport.data import Receiver

from .rig import until
from .siege import HONEST, Siege, digest_of, receiver_at

ROOT = Path(__file__).parents[3]


FLAT_BYTES = 6 << 20


class Tally:
    """What a receiver delivered: (sequence, digest) by sender."""

    def __init__(self) -> None:
        self.by_sender: dict[str, list[tuple[int, str]]] = defaultdict(list)

    def add(self, sender: str, sequence: int, digest: str) -> None:
        self.by_sender[sender].append((sequence, digest))

    def check(self, siege: Siege) -> None:
        assert [digest for _, digest in self.by_sender[HONEST]] == siege.sent
        for sender, deliveries in self.by_sender.items():
            numbers = [sequence for sequence, _ in deliveries]
            assert numbers == sorted(set(numbers)), sender
            assert sender == HONEST or all(
                digest in siege.lies[sender, number] for number, digest in deliveries
            )


def take(receiver: Receiver, tally: Tally) -> None:
    while (delivery := receiver.receive()) is not None:
        delivery.batch.validate(full=True)
        tally.add(delivery.sender, delivery.sequence, digest_of(delivery.batch))
        delivery.ack()


@pytest.mark.parametrize("seed", [0, 1])
def test_mutated_frames_change_nothing_of_what_an_honest_sender_sends(
    folder: Path, seed: int
) -> None:
    receiver = receiver_at(f"ipc://{folder}/edge")
    siege, tally = Siege(receiver.address, seed), Tally()
    until(lambda: (receiver.poll(), siege.sender.poll(), siege.sender.room() > 0)[2])
    while siege.fired < 750:
        siege.volley(len(tally.by_sender[siege.liar]))
        take(receiver, tally)
    siege.sender.finish()
    until(lambda: (take(receiver, tally), siege.sender.poll(), siege.sender.drained)[2])
    tally.check(siege)
    assert len(siege.sent) > 50
    assert receiver.refused > siege.fired // 3
    siege.close()
    receiver.close()


class Child:
    """A besieged receiver in a process of its own."""

    def __init__(self, address: str) -> None:
        self.tally = Tally()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.transport.data.siege", address],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "transport")},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._child.stdout is not None
        self.address = self._child.stdout.readline().strip()
        self._answers: list[list[int]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            first, *rest = line.split()
            if first == "?":
                self._answers.append([int(number) for number in rest])
            else:
                self.tally.add(first, int(rest[0]), rest[1])

    def ask(self) -> tuple[int, int]:
        """(messages refused, resident bytes)."""
        known = len(self._answers)
        assert self._child.stdin is not None
        self._child.stdin.write("?\n")
        self._child.stdin.flush()
        until(lambda: len(self._answers) > known or self._child.poll() is not None)
        refused, rss = self._answers[-1]
        return refused, rss

    def end(self) -> tuple[int, str]:
        """(exit status, what it said on standard error)."""
        assert self._child.stdin is not None and self._child.stderr is not None
        self._child.stdin.close()
        said = self._child.stderr.read()
        status = self._child.wait(20)
        self._reader.join(20)
        return status, said

    def kill(self) -> None:
        """However it stands."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture(params=["ipc", "tcp"])
def child(request: pytest.FixtureRequest, folder: Path) -> Iterator[Child]:
    made = Child(f"ipc://{folder}/edge" if request.param == "ipc" else "tcp://127.0.0.1:*")
    yield made
    made.kill()


@pytest.mark.slow
def test_a_process_survives_ten_thousand_mutated_frames_in_flat_memory(child: Child) -> None:
    siege = Siege(child.address, seed=7)
    resident = {}
    until(lambda: (siege.sender.poll(), siege.sender.room() > 0)[1])
    for step in range(1000, 10_001, 1000):
        while siege.fired < step:
            siege.volley(len(child.tally.by_sender[siege.liar]))
            # no faster than the child can read: what waits for it is no part of its memory
            if siege.fired % 50 == 0:
                until(lambda: (siege.sender.poll(), siege.sender.unacknowledged == 0)[1])
        until(lambda: (siege.sender.poll(), siege.sender.unacknowledged == 0)[1])
        resident[step] = child.ask()[1]
    refused, _ = child.ask()
    siege.sender.finish()
    until(lambda: (siege.sender.poll(), siege.sender.drained)[1])
    assert child.end() == (0, "")
    child.tally.check(siege)
    assert len(siege.sent) > 500
    assert refused > siege.fired // 3
    assert resident[10_000] - resident[2000] < FLAT_BYTES, resident
    siege.close()
