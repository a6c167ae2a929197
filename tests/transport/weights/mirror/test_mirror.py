"""Readers of one host take a trainer's versions once over the network, and hand them to each other
through memory.
"""

import contextlib
import functools
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from transport.security import RunKeys
from transport.weights import Layout
from transport.weights.deltas.ends import DeltaWriter
from transport.weights.encoding import Encoding
from transport.weights.mirror import choice
from transport.weights.mirror.reader import travelling
from transport.weights.rank_reader import RankReader

from ..sharded_rig import FAST, full
from .rig import MODEL, WHOLE, holds, neighbour, offered, place_of, until

HALVES = Layout.fsdp(MODEL, 2)
LATE_S = 1.5


@pytest.fixture(scope="module")
def keys() -> RunKeys:
    return RunKeys.make()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "SILENT_S", 0.6)
    monkeypatch.setattr(choice, "APART_S", 0.2)


@contextlib.contextmanager
def neighbours(keys, address, folder, count=3, **knobs):
    made = [neighbour(keys, address, folder, number, **knobs) for number in range(count)]
    try:
        yield [reader for reader, _ in made], [mine for _, mine in made]
    finally:
        for reader, _ in made:
            reader.close()


def held(coordinator) -> dict[str, int]:
    """Of those to whom the first reader hands versions on."""
    return {name: taken.version for name, taken in coordinator.sent["generator-0"].behind.items()}


@pytest.mark.parametrize("layout", [WHOLE, HALVES], ids=["1 rank", "2 ranks"])
def test_one_reader_takes_each_version_over_the_network_and_all_hold_it(keys, folder, layout):
    with (
        offered(keys, layout) as (trainer, address),
        neighbours(keys, address, folder) as (readers, mine),
    ):
        for version in range(1, 6):
            trainer.publish(version)
            until(lambda version=version: {each.version for each in readers} == {version}, *readers)
            assert all(holds(each, version) for each in mine)
        assert [each.leads for each in readers] == [True, False, False], (
            "the first by the plan's order"
        )
        coordinator = trainer.writers[0]
        assert list(coordinator.sent) == ["generator-0"]
        size = sum(tensor.nbytes for tensor in mine[0].values())
        until(lambda: held(coordinator) == {"generator-1": 5, "generator-2": 5}, *readers)
        sent, whole = coordinator.traffic
        assert sent == 5 * size and whole > sent, (
            "what the neighbours did not ask for counts as saved"
        )


def test_each_exchange_is_timed_by_trainer_and_reader_also_behind_the_mirror(keys, folder):
    """One neighbour hears of a version and takes it a while later; who hands it on is timed by its
    own loop, not by the thread that has it first.
    """
    with offered(keys) as (trainer, address), neighbours(keys, address, folder) as (readers, _):
        coordinator = trainer.writers[0]
        trainer.publish(1)
        until(lambda: {each.version for each in readers} == {1}, *readers)
        until(lambda: held(coordinator) == {"generator-1": 1, "generator-2": 1}, *readers)
        until(lambda: coordinator.sent["generator-0"].committed_s > 0, *readers)
        first, began = coordinator.sent["generator-0"].committed_s, time.monotonic()
        trainer.publish(2)
        until(lambda: coordinator.sent["generator-0"].committed_s != first, readers[0])
        own_s = time.monotonic() - began
        until(lambda: readers[1].poll() is not None)
        heard = time.monotonic()
        until(lambda: readers[1].poll() is not None and time.monotonic() - heard >= LATE_S)
        last = time.monotonic()
        until(lambda: {each.version for each in readers} == {2}, *readers)
        last_s = time.monotonic() - last
        until(lambda: held(coordinator) == {"generator-1": 2, "generator-2": 2}, *readers)
        sent = coordinator.sent["generator-0"]
        late, soon = sent.behind["generator-1"], sent.behind["generator-2"]
        assert all(0 < each.taken_s <= each.committed_s for each in (sent, late, soon))
        assert sent.committed_s <= own_s and late.taken_s >= LATE_S
        assert soon.taken_s <= last_s and soon.committed_s >= LATE_S
        time.sleep(4 * FAST.heartbeat_s)
        assert coordinator.sent["generator-0"].behind == sent.behind, "as it was heard first"


def test_a_version_lies_in_two_segments_of_which_all_parameters_are_views(keys, folder):
    """No copy beside the one in use and the one that arrives, however many readers there are; and
    each reads what it verified by itself.
    """
    with offered(keys) as (trainer, address), neighbours(keys, address, folder) as (readers, mine):
        for version in (1, 2, 3):
            trainer.publish(version)
            until(lambda version=version: {each.version for each in readers} == {version}, *readers)
        lead = readers[0]._mirror
        until(lambda: len(lead._receiver._segments._buffers) == 2, *readers)
        assert lead._writer.segments == (2, 0)
        assert len([path for path in folder.iterdir() if path.name.startswith("dataflow-")]) == 2
        mapped = {
            line.split()[-1]: line
            for line in Path(f"/proc/{os.getpid()}/maps").read_text().splitlines()
        }
        front = [name for name in mapped if name.startswith(f"{folder}/dataflow-")]
        assert len(front) == 2
        for reader, own in zip(readers, mine, strict=True):
            buffer = reader._attached._inside.segment.buffer
            inside = range(buffer.data_ptr(), buffer.data_ptr() + buffer.numel())
            assert all(tensor.data_ptr() in inside for tensor in own.values())


def test_when_the_mirror_leaves_a_neighbour_is_the_next_and_no_version_is_lost(keys, folder):
    with offered(keys) as (trainer, address), neighbours(keys, address, folder) as (readers, mine):
        trainer.publish(1)
        until(lambda: {each.version for each in readers} == {1}, *readers)
        readers[0].close()
        trainer.publish(2)
        rest = readers[1:]
        until(lambda: {each.version for each in rest} == {2}, *rest)
        assert [each.leads for each in rest] == [True, False]
        assert all(holds(each, 2) for each in mine[1:]) and holds(mine[0], 1)
        until(lambda: list(trainer.writers[0].sent) == ["generator-1"], *rest)


def test_a_mirror_that_was_stopped_holds_nobody_up_and_follows_when_it_goes_on(keys, folder):
    with offered(keys) as (trainer, address), neighbours(keys, address, folder) as (readers, mine):
        trainer.publish(1)
        until(lambda: {each.version for each in readers} == {1}, *readers)
        stopped = readers[0]._mirror
        with Stopped(stopped):
            trainer.publish(2)
            rest = readers[1:]
            until(lambda: {each.version for each in rest} == {2}, *rest)
            assert [each.leads for each in rest] == [True, False] and holds(mine[0], 1)
        until(lambda: not stopped.is_alive(), *readers)
        trainer.publish(3)
        until(lambda: {each.version for each in readers} == {3}, *readers)
        assert [each.leads for each in readers] == [False, True, False]
        assert all(holds(each, 3) for each in mine)
        assert not list(
            folder.glob(f"{readers[0]._place.at(readers[0]._place.own).place.prefix}*")
        ), "it has left nothing"


def test_a_reader_that_is_started_again_under_its_name_joins_its_neighbours(keys, folder):
    with offered(keys) as (trainer, address), neighbours(keys, address, folder, 2) as (readers, _):
        trainer.publish(1)
        until(lambda: {each.version for each in readers} == {1}, *readers)
        readers[0].close()
        again, holding = neighbour(keys, address, folder, 0, attempt=1)
        with contextlib.closing(again):
            until(lambda: {again.version, readers[1].version} == {1}, again, readers[1])
            trainer.publish(2)
            until(lambda: {again.version, readers[1].version} == {2}, again, readers[1])
            assert holds(holding, 2) and sorted([again.leads, readers[1].leads]) == [False, True]


def test_what_a_trainer_that_was_started_again_offers_is_taken_whatever_its_number(keys, folder):
    now = {"at": ""}
    with (
        offered(keys) as (trainer, address),
        neighbours(keys, address, folder, seek=lambda: now["at"]) as (readers, mine),
    ):
        trainer.publish(7)
        until(lambda: {each.version for each in readers} == {7}, *readers)
        trainer.close()
        with offered(keys) as (successor, now["at"]):
            successor.publish(5)
            until(lambda: {each.version for each in readers} == {5}, *readers)
            assert all(holds(each, 5) for each in mine)


def test_a_neighbour_that_stays_in_an_old_version_is_left_behind_with_it(keys, folder):
    """The others have the newest; the memory of the old one goes with its last reader."""
    with (
        offered(keys) as (trainer, address),
        neighbours(keys, address, folder, 2) as (readers, mine),
    ):
        trainer.publish(1)
        until(lambda: {each.version for each in readers} == {1}, *readers)
        lead = readers[0]._mirror
        lead._writer._offers.pace = type(lead._writer._offers.pace)(release_s=0.3)
        for version in (2, 3, 4):
            trainer.publish(version)
            until(lambda version=version: readers[0].version == version, readers[0])
        assert holds(mine[1], 1) and readers[1].version == 1
        assert lead._writer.segments == (2, 1)
        until(lambda: readers[1].version == 4 and lead._writer.segments == (2, 0), *readers)
        assert holds(mine[1], 4)


def test_notes_of_the_trainer_reach_all(keys, folder):
    with offered(keys) as (trainer, address), neighbours(keys, address, folder, 2) as (readers, _):
        trainer.writers[0].tell({"dropped": 3})
        trainer.publish(1)
        until(lambda: all(each.note == {"dropped": 3} for each in readers), *readers)
        trainer.writers[0].tell({"dropped": 4})
        until(lambda: all(each.note == {"dropped": 4} for each in readers), *readers)


def test_deltas_arrive_in_the_segments_that_are_handed_on(keys, folder):
    """Changes are put onto the version that neighbours read, in the other segment; theirs stays as
    it is.
    """
    deltas = functools.partial(DeltaWriter, link_bytes_per_s=1e6)
    with (
        offered(keys, kind=deltas) as (trainer, address),
        neighbours(keys, address, folder) as (readers, mine),
    ):
        for version in range(1, 5):
            tensors = full(WHOLE, 1)
            tensors["t2"][3, 5] = version
            trainer.writers[0].publish(version, tensors)
            until(lambda version=version: {each.version for each in readers} == {version}, *readers)
            assert all(
                torch.equal(each[name], tensor) for each in mine for name, tensor in tensors.items()
            )
        sent, whole = trainer.writers[0].traffic
        size = sum(tensor.nbytes for tensor in mine[0].values())
        assert size < sent < 2 * size and whole >= 4 * size


def test_further_ranks_of_a_reader_take_their_slices_from_the_same_segments(keys, folder):
    """Of any of the host's mirrors: they know the segments by the name that all share."""
    place, rows = (
        place_of(folder, "generator-0", 0),
        {name: (shape, 0, ((12, 24),)) for name, (shape, _) in MODEL.items()},
    )
    with offered(keys) as (trainer, address), neighbours(keys, address, folder, 2) as (readers, _):
        half = {name: torch.nn.Parameter(torch.zeros(12, 16)) for name in MODEL}
        rank = RankReader(place.at(place.line), "generator-1.1")
        rank.attach(half, rows)
        for version in (1, 2):
            trainer.publish(version)
            until(lambda version=version: readers[0].version == version, readers[0])
            until(lambda: readers[1].poll() is not None)
            held = readers[1].verify()
            assert rank.enter(held.segment, held.version, held.layout)
            assert readers[1].adopt() == rank.adopt() == version
            assert all(
                torch.equal(half[name], tensor[12:])
                for name, tensor in full(WHOLE, version).items()
            )
        rank.close()


def test_what_travels_is_told_from_what_a_reader_attaches():
    """Its dtype is that of the trainer's encoding, but for what is narrow already, and its scales;
    slices are whole.
    """
    mine = {
        "a": torch.zeros(4, 6),
        "b": torch.zeros(4, 6, dtype=torch.int8),
        "b:scale": torch.zeros(4, 1),
    }
    cut = [{"a": ((8, 6), 0, ((0, 4),))}, {"a": ((8, 6), 0, ((4, 8),))}]
    made = travelling(
        Encoding(dtype="bfloat16", quantized="int8", names=frozenset({"b"})), mine, cut
    )
    assert {name: (held.shape, held.dtype) for name, held in made.tensors.items()} == {
        "a": ((8, 6), "bfloat16"),
        "b": ((4, 6), "int8"),
        "b:scale": ((4, 1), "float32"),
    }


class Stopped:
    """A mirror whose thread does nothing for a while, as that of a process that was stopped; its
    reader looks at nothing either, for nobody polls it.
    """

    def __init__(self, mirror) -> None:
        self._mirror, self._go, self._turn = mirror, threading.Event(), mirror._turn

    def __enter__(self) -> None:
        self._mirror._turn = self._go.wait

    def __exit__(self, *_: object) -> None:
        self._mirror._turn = self._turn
        self._go.set()
