"""Channels: messages arrive whole and in order, files with them, and the end of a peer is
noticed.
"""

import fcntl
import os
import resource
import socket
import threading
import time

import pytest

from dataflow.system.messages import BODY, LENGTH, Channel, Codec, Message, MessageError


class Note(Message):
    number: int
    data: bytes = b""


CODEC = Codec("test", 1, Note, max_bytes=1 << 26)


LARGE = Note(1, bytes(1 << 24))


@pytest.fixture
def ends(request):
    send_s = getattr(request, "param", 20.0)
    one, other = (Channel(end, CODEC, send_s) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_messages_arrive_whole_and_in_order(ends):
    notes = [Note(number, b"x" * 5000) for number in range(5)]
    for note in notes:
        ends[0].send(note)
    assert [ends[1].receive(5.0) for _ in notes] == notes
    assert not ends[1].readable(0.0)
    for note in notes:
        ends[0].post(note)
    assert ends[1].arrived() == notes
    assert ends[1].arrived() == []


def test_a_channel_works_whatever_the_number_of_its_file():
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:  # select.select knows numbers up to 1,023
        files = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 2000) for end in (ours, theirs)]
    one, other = (Channel(socket.socket(fileno=file), CODEC, 20.0) for file in files)
    reader = threading.Thread(target=lambda: other.send(other.receive(20.0)))
    reader.start()
    one.send(LARGE)
    assert one.receive(20.0) == LARGE
    reader.join(20.0)
    one.close()
    other.close()


def test_a_message_larger_than_the_socket_arrives_whole_by_posts_and_by_a_waiting_sender(ends):
    ends[0].post(LARGE)
    found = []
    deadline = time.monotonic() + 20.0
    while not found:
        assert time.monotonic() < deadline
        ends[0].flush()
        found = ends[1].arrived()
    assert found == [LARGE] and not ends[0].has_output
    taken = []
    reader = threading.Thread(target=lambda: taken.append(ends[1].receive(20.0)))
    reader.start()
    ends[0].send(LARGE)
    reader.join(20.0)
    assert taken == [LARGE]


def test_the_end_of_a_peer_is_heard_after_what_it_said_also_in_the_middle_of_a_message(ends):
    ends[0].send(Note(1))
    ends[0]._end.sendall(LENGTH.pack(9) + b"half")
    ends[0].close()
    assert ends[1].receive(5.0) == Note(1)
    for take in (lambda: ends[1].receive(5.0), ends[1].arrived):
        with pytest.raises(EOFError):
            take()


def test_what_came_before_a_deadline_is_kept(ends):
    whole = CODEC.encode(Note(7))
    ends[0]._end.sendall(LENGTH.pack(len(whole)) + whole[:3])
    with pytest.raises(TimeoutError):
        ends[1].receive(0.01)
    ends[0]._end.sendall(whole[3:])
    assert ends[1].receive(5.0) == Note(7)


@pytest.mark.parametrize("ends", [0.05], indirect=True)
def test_a_peer_that_does_not_read_is_waited_for_up_to_a_deadline(ends):
    with pytest.raises(TimeoutError):
        ends[0].send(LARGE)


@pytest.mark.parametrize("junk", [LENGTH.pack(3) + b"abc", LENGTH.pack(1 << 40), b"\xff" * 100])
def test_what_is_no_message_is_refused(ends, junk):
    ends[0]._end.sendall(junk)
    with pytest.raises(MessageError, match=".*; .*"):
        ends[1].receive(5.0)


def test_bodies_come_with_their_messages_in_their_order(ends):
    ends[0].post(Note(1), body=b"of one")
    ends[0].send(Note(2))
    ends[0].send(Note(3), b"")
    ends[0].post(Note(4), body=bytes(1 << 10))
    assert [ends[1].receive(5.0), *ends[1].arrived()] == [Note(1), Note(2), Note(3), Note(4)]
    assert [*ends[1].bodies] == [b"of one", b"", bytes(1 << 10)]


def test_a_body_that_is_too_large_is_refused_on_both_sides(ends):
    with pytest.raises(
        MessageError, match=f"found {(1 << 26) + 1} bytes, the bound is {1 << 26}; send less"
    ):
        ends[0].post(Note(1), body=bytes((1 << 26) + 1))
    ends[0]._end.sendall(LENGTH.pack(BODY | 1 << 40))
    with pytest.raises(MessageError, match=f"found {1 << 40} bytes"):
        ends[1].receive(5.0)


def test_open_files_come_with_a_message(ends, tmp_path):
    (tmp_path / "file").write_text("text")
    with (tmp_path / "file").open() as file:
        ends[0].post(Note(1), [file.fileno()])
        ends[0].post(Note(2))
    assert ends[1].arrived() == [Note(1), Note(2)]
    (taken,) = ends[1].files
    assert os.read(taken, 100) == b"text"
    ends[1].close()
    with pytest.raises(OSError):
        os.fstat(taken)


def test_a_time_out_of_the_socket_makes_no_call_wait_that_returns_at_once():
    one, other = socket.socketpair()
    one.settimeout(0.2)
    channel = Channel(one, CODEC)
    assert channel.arrived() == []
    channel.close()
    other.close()
