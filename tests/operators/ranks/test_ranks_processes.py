"""Ranks that are forked: what they inherit, what they do not, and that they end with their
parent.
"""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dataflow.errors import RunError, WorkerDied
from dataflow.limits import Limits
from dataflow.system.child import Child
from dataflow.system.messages import Channel, Message
from operators.ranks import team as team_module
from operators.ranks.team import Team, codec_of, forked, program

WAIT_S = 20.0


class Answer(Message):
    text: str
    rank: int
    has_no_other_file: bool


class End(Message):
    status: int


CODEC = codec_of("test", Answer, End)


def channel_of(end):
    return Channel(socket.socket(fileno=end), CODEC, WAIT_S)


def test_a_fork_runs_a_closure_with_no_open_file_of_its_parents_but_its_own_end(tmp_path):
    words = {"said": "by a closure"}

    def main(end, rank):
        channel = channel_of(end)
        held = {
            int(each.name): os.path.realpath(each)
            for each in Path("/dev/fd").iterdir()
            if each.exists()
        }
        mine = {number for number, file in held.items() if number > 2 and file != os.devnull}
        channel.send(Answer(words["said"], rank, mine == {end}))
        return channel.receive(WAIT_S).status

    with (tmp_path / "open").open("w"):
        team = Team("worker", 3, forked(main), Limits(start_s=WAIT_S, exchange_s=WAIT_S), CODEC)
        try:
            assert [team.answer(rank, Answer) for rank in (1, 2)] == [
                Answer(words["said"], 1, True),
                Answer(words["said"], 2, True),
            ]
            assert not team.fallen()
            team.tell(End(3), 1)
            with pytest.raises(WorkerDied, match="rank 1 of 'worker' .* ended with status 3"):
                team.answer(1, Answer)
            assert team.fallen()
        finally:
            team.tell(End(0), 2)
            team.close()


KEEPS = """
import os, socket, sys
end, kept = map(int, sys.argv[1:])
socket.socket(fileno=end).send(str(os.fstat(kept).st_ino).encode())
"""


@pytest.mark.parametrize("starts", ["fork", "program"])
def test_a_rank_has_the_open_files_that_it_is_to_keep(starts, tmp_path, monkeypatch):
    def main(end, rank):
        socket.socket(fileno=end).send(str(os.fstat(file.fileno()).st_ino).encode())
        return 0

    with (tmp_path / "turn").open("w") as file:
        number = file.fileno()
        (tmp_path / "keeps.py").write_text(f"import sys\nsys.argv.append('{number}')\n{KEEPS}")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        start = forked(main, keep=[number]) if starts == "fork" else program("keeps", keep=[number])
        ours, theirs = socket.socketpair()
        with ours, theirs:
            rank = start(theirs, 1)
            theirs.close()
            ours.settimeout(WAIT_S)
            assert int(ours.recv(100)) == os.fstat(number).st_ino
        rank.wait(WAIT_S)


def test_an_error_in_a_fork_ends_it_alone():
    def main(end, rank):
        raise ValueError("in the fork")

    team = Team("worker", 2, forked(main), Limits(start_s=WAIT_S, exchange_s=WAIT_S), CODEC)
    with pytest.raises(WorkerDied, match="rank 1 of 'worker' .* ended with status 1"):
        team.answer(1, Answer)
    team.close()


def test_waiting_for_a_fork_has_a_deadline_and_tells_its_signal():
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    process = Child(pid)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(WAIT_S) == -signal.SIGKILL
    process.kill()


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel tells of a parent's end on Linux alone"
)
def test_a_fork_ends_with_its_parent_however_that_ends():
    hears, tells = os.pipe()

    def sleeping(end, rank):
        time.sleep(600)
        return 0

    parent = os.fork()
    if parent == 0:
        _, theirs = socket.socketpair()
        child = forked(sleeping)(theirs, 1)
        os.write(tells, str(child.pid).encode())
        time.sleep(600)
        os._exit(0)
    child = int(os.read(hears, 100))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + WAIT_S
    while _runs(child):
        assert time.monotonic() < deadline, "the fork has outlived its parent"
        time.sleep(0.01)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_has_used_a_gpu_forks_no_rank(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        pytest.raises(RunError, match="has used CUDA; .*before anything touches the GPU"),
    ):
        forked(lambda end, rank: 0)(theirs, 1)


def played(ends):
    """Starts ranks that say and read nothing; their ends."""

    def start(end, rank):
        ends.append(end.dup())
        child = Child(0)
        child.returncode = 0
        return child

    return start


def test_a_team_may_be_larger_than_the_shell_lets_a_process_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ends = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/dev/fd").iterdir())) + 30, hard))
    try:
        team = Team("worker", 64, played(ends), Limits(), CODEC)
        team.close()
    finally:
        for end in ends:
            end.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(ends) == 63


def test_closing_does_not_wait_for_each_rank_that_reads_nothing(monkeypatch):
    monkeypatch.setattr(team_module, "END_S", 0.1)
    ends = []
    team = Team("worker", 9, played(ends), Limits(exchange_s=WAIT_S), CODEC)
    team.limits = Limits(exchange_s=0.1)
    with pytest.raises(TimeoutError, match="does not read"):
        team.tell(Answer("x" * (4 << 20), 0, True))
    began = time.monotonic()
    team.close()
    assert time.monotonic() - began < WAIT_S
    for end in ends:
        end.close()


def test_what_all_ranks_are_told_is_encoded_once(monkeypatch):
    ends, encoded = [], []
    team = Team("worker", 9, played(ends), Limits(), CODEC)
    encode = CODEC.encode
    monkeypatch.setattr(CODEC, "encode", lambda message: encoded.append(message) or encode(message))
    team.tell(End(3))
    assert encoded == [End(3)]
    channels = [channel_of(end.detach()) for end in ends]
    assert [channel.receive(WAIT_S) for channel in channels] == [End(3)] * 8
    team.close()
    for channel in channels:
        channel.close()
