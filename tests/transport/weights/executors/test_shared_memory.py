"""Shared memory keeps out who does not belong, and says so when there is none left."""

import errno
import os
import socket
import time
from contextlib import closing

import msgpack
import pytest
import torch
import zmq

from transport.errors import AddressError
from transport.native import Copier
from transport.native.build import library
from transport.weights import (
    ChecksumMismatch,
    FlatLayout,
    SegmentError,
    SharedMemory,
    WeightReader,
    WeightWriter,
)
from transport.weights import writer as writing
from transport.weights.protocol.messages import CODEC, Offer, Upcoming

from ..conftest import leftovers, parameters, values

pytestmark = pytest.mark.usefixtures("clean_shm")


LAYOUT = FlatLayout.of(parameters())


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/w.sock"


@pytest.fixture
def writer(address):
    writer = WeightWriter(LAYOUT, address)
    yield writer
    writer.close()


@pytest.fixture
def reader(address):
    reader = WeightReader(address, "generator-0")
    yield reader
    reader.close()


def joined(writer, reader, mine):
    reader.attach(mine)
    while not any(status.version == writer.version for status in writer.readers):
        writer.poll()
        if reader.poll():
            reader.adopt()


@pytest.mark.parametrize(
    "address",
    ["tcp://10.0.0.7:5000", "tcp://*:5000", "tcp://127.0.0.1", "inproc://w", "w.sock", ""],
)
def test_an_address_that_others_could_reach_is_refused(address):
    with pytest.raises(AddressError, match="stay on one machine; found address"):
        SharedMemory(address)


def test_a_folder_that_others_can_enter_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(AddressError, match="found mode 0755; make it with mode 0700"):
        SharedMemory(f"ipc://{tmp_path}/w.sock")


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(AddressError, match="found no such folder"):
        SharedMemory(f"ipc://{tmp_path}/none/w.sock")


def test_an_address_too_long_for_a_socket_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(AddressError, match="at most 107 characters"):
        WeightWriter(LAYOUT, f"ipc://{tmp_path}/{'w' * 120}")


def test_loopback_serves_as_well(unused_port):
    mine = parameters()
    writer = WeightWriter(LAYOUT, f"tcp://127.0.0.1:{unused_port}")
    reader = WeightReader(f"tcp://127.0.0.1:{unused_port}", "generator-0")
    writer.publish(1, parameters(1))
    joined(writer, reader, mine)
    assert values(mine) == {1}
    reader.close()
    writer.close()


@pytest.fixture
def unused_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


def test_full_memory_is_an_error_that_says_what_to_do(writer, monkeypatch):
    def full(file, start, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(SegmentError, match=r"found No space left on device, .*; enlarge it"):
            writer.publish(1, parameters(1))
    assert writer.pending == 1
    writer.poll()
    assert writer.version == 1


def test_segments_are_for_their_owner_alone(writer):
    writer.publish(1, parameters(1))
    site = writer._port._place
    modes = [(site.folder / name).stat().st_mode & 0o777 for name in leftovers(site.url)]
    assert modes == [0o600]


def test_a_segment_outside_the_address_is_never_opened(address, tmp_path, reader):
    (tmp_path / "other").write_bytes(bytes(4096))
    site = SharedMemory(address)
    for key in (
        "../../etc/passwd",
        "other",
        site.place.prefix + "/../other",
        site.place.prefix + "nowhere",
    ):
        assert reader._port.segment(key, 4032) is None


def test_a_reader_that_writes_to_its_views_spoils_nobody_elses(writer, reader, address):
    mine, theirs = parameters(), parameters()
    other = WeightReader(address, "generator-1")
    other.attach(theirs)
    writer.publish(1, parameters(1))
    joined(writer, reader, mine)
    while other.version != 1:
        writer.poll()
        if other.poll():
            other.adopt()
    with torch.no_grad():
        mine["up"].fill_(5)
    assert values(theirs) == {1}
    with pytest.raises(ChecksumMismatch, match="generator-0"):
        for version in range(2, 9):
            writer.publish(version, parameters(version))
            while other.version != version:
                writer.poll()
                for end in (other, reader):
                    if end.poll():
                        end.adopt()
    other.close()


def test_what_is_no_message_is_dropped_by_the_writer_with_a_warning(writer, address):
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(address)
    stranger.send(msgpack.packb({"kind": "hello"}))
    writer.socket.poll(5000)
    with pytest.warns(RuntimeWarning, match="of another protocol or version; found"):
        writer.poll()
    assert writer.readers == ()
    stranger.close()


def test_what_is_no_message_changes_nothing_at_a_reader_and_is_told_once(address, reader):
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(address)
    reader.poll()
    peer, _ = router.recv_multipart()
    for _ in range(2):
        router.send_multipart([peer, b"\xc1"])
    reader.socket.poll(5000)
    with pytest.warns(RuntimeWarning, match="of another protocol or version; found") as told:
        assert reader.poll() is None
        reader.socket.poll(100)
        assert reader.poll() is None
    assert len(told) == 1
    router.close()


def test_an_offer_of_an_epoch_that_is_not_the_readers_is_ignored(address, reader):
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(address)
    reader.poll()
    peer, _ = router.recv_multipart()
    router.send_multipart([peer, CODEC.encode(Offer(epoch=9, version=1, segment="x", sums=b""))])
    reader.socket.poll(5000)
    assert reader.poll() is None
    router.close()


def test_a_killed_writers_segments_are_swept_by_the_next(address):
    site = SharedMemory(address)
    for name in ("one", "two"):
        (site.place.folder / f"{site.place.prefix}{name}").write_bytes(b"stale")
    site.writer(lambda: None).close()
    assert leftovers(address) == set()


def test_an_address_is_free_for_the_next_writer_as_soon_as_close_returns(address, unused_port):
    for place in (address, f"tcp://127.0.0.1:{unused_port}"):
        for version in range(10):
            mine = parameters()
            with (
                closing(WeightWriter(LAYOUT, place)) as writer,
                closing(WeightReader(place, "r")) as reader,
            ):
                writer.publish(version, parameters(version))
                joined(writer, reader, mine)
                assert values(mine) == {version}


@pytest.fixture
def steps(writer, reader, monkeypatch):
    """Publishes in two halves, with what shall happen in between; the reader has joined and holds
    version 1.
    """
    mine = parameters()
    writer.publish(1, parameters(1))
    joined(writer, reader, mine)
    fill, half = writing.fill, LAYOUT.tensors[1].offset

    def publish(version, between):
        def in_halves(filler, sources):
            filler._destinations[0].fill_(version)
            filler._progress[1] = half
            between(filler)
            return fill(filler, sources)

        with monkeypatch.context() as patch:
            patch.setattr(writing, "fill", in_halves)
            writer.publish(version, parameters(version))
        return mine

    return publish


def until(condition, *ends):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        for end in ends:
            if end.poll() and isinstance(end, WeightReader):
                end.adopt()


def follows(reader, version):
    arrival = reader._arrival
    return arrival is not None and arrival.version == version and arrival.running


needs_compiler = pytest.mark.skipif(library() is None, reason="no C compiler: nobody reads along")


@needs_compiler
def test_a_reader_that_hears_of_a_version_before_its_first_byte_is_written_reads_along(
    writer, reader, steps
):
    def late(peer, message):
        whole = send(peer, message)
        if isinstance(message, Upcoming):
            until(lambda: reader._arrival is not None and reader._arrival.version == 2, reader)
            time.sleep(0.05)
        return whole

    send, proved = writer._port.send, []
    writer._port.send = late
    steps(2, lambda filler: proved.append(follows(reader, 2)))
    assert proved == [True]


@needs_compiler
def test_a_version_is_proved_while_it_is_written_and_adopted_when_it_is_whole(steps, reader):
    def between(filler):
        until(lambda: follows(reader, 2), reader)
        for _ in range(100):
            assert reader.poll() is None
        assert reader.adopt() == 1

    mine = steps(2, between)
    assert values(mine) == {1}
    until(lambda: reader.version == 2, reader)
    assert values(mine) == {2}


@needs_compiler
def test_a_publish_that_fails_half_way_leaves_its_followers_on_their_version(steps, writer, reader):
    def between(filler):
        until(lambda: follows(reader, 2), reader)
        raise RuntimeError("the trainer ran out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        steps(2, between)
    until(lambda: not reader._arrival.running, reader)
    assert reader.poll() is None
    mine = steps(3, lambda filler: until(lambda: follows(reader, 3), reader))
    until(lambda: reader.version == 3, writer, reader)
    assert values(mine) == {3}


@needs_compiler
def test_bytes_that_are_spoilt_before_their_turn_to_be_proved_are_found_at_that_sync(
    steps, reader, monkeypatch
):
    fill = Copier.run

    def spoilt(copies, sources):
        sums = fill(copies, sources)
        return [*sums[:-1], sums[-1] ^ 1]

    monkeypatch.setattr(Copier, "run", spoilt)
    mine = steps(2, lambda filler: until(lambda: follows(reader, 2), reader))
    with pytest.raises(ChecksumMismatch, match="tensor 'scale'"):
        until(lambda: reader.version == 2, reader)
    assert values(mine) == {1}
