"""vLLM's process ends with its worker, and so does all that it has started, whatever state they are
in.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rigs.machine import wait_until

from operators.engine.vllm.process import SHARED, ServerProcess

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[4]
HUNG = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0 and os.fork() == 0:
    os.setsid()
with open(sys.argv[1], "a") as out:
    out.write(f"{os.getpid()}\\n")
while True:
    time.sleep(60)
"""
"""Three generations that ignore signals and never look at the stream; the youngest has a session of
its own."""
WORKER = """
import os, signal, sys, time
from operators.engine.vllm.process import ServerProcess
process = ServerProcess([sys.executable, "-c", HUNG, sys.argv[1]], os.environ)
while True:
    time.sleep(60)
"""
IN_A_THREAD = """
import os, sys, threading, time
from operators.engine.vllm.process import ServerProcess
made = []
def make():
    made.append(ServerProcess([sys.executable, "-c", HUNG, sys.argv[1]], os.environ))
maker = threading.Thread(target=make)
maker.start()
maker.join()
while True:
    time.sleep(60)
"""


def pids(path: Path) -> list[int]:
    """Of the three generations, once all are there."""
    wait_until(lambda: path.exists() and len(path.read_text().split()) == 3, 30.0)
    return [int(line) for line in path.read_text().split()]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def started(tmp_path: Path):
    """A worker with a hung server below it, and the numbers of the server's generations."""
    workers: list[subprocess.Popen[bytes]] = []
    path = tmp_path / "pids"

    def start(program: str) -> tuple[subprocess.Popen[bytes], list[int]]:
        source = f"HUNG = {HUNG!r}\n{program}"
        workers.append(subprocess.Popen([sys.executable, "-c", source, str(path)], cwd=ROOT))
        return workers[-1], pids(path)

    yield start
    for worker in workers:
        worker.kill()
        worker.wait()
    for pid in [int(line) for line in path.read_text().split()]:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_hung_server_and_all_that_it_has_started_end_with_their_worker(number, started):
    worker, below = started(WORKER)
    assert not any(gone(pid) for pid in below)
    worker.send_signal(number)
    worker.wait(30.0)
    wait_until(lambda: all(gone(pid) for pid in below), 30.0)


def test_a_server_outlives_the_thread_that_started_it_and_not_the_worker(started):
    worker, below = started(IN_A_THREAD)
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(below[0]).wait(1.5)
    worker.kill()
    wait_until(lambda: all(gone(pid) for pid in below), 30.0)


def test_a_server_that_is_of_no_use_any_more_is_killed_with_all_that_it_has_started(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("operators.engine.vllm.process.END_S", 2.0)
    process = ServerProcess([sys.executable, "-c", HUNG, str(tmp_path / "pids")], os.environ)
    below = pids(tmp_path / "pids")
    process.close()
    assert all(gone(pid) for pid in below)


@pytest.mark.parametrize(
    ("code", "ended"), [("import sys; sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_its_exit_code_is_that_of_the_server(code, ended):
    process = ServerProcess([sys.executable, "-c", code], os.environ)
    assert process._child.wait(30.0) == ended
    process.close()


def test_server_and_worker_stop_and_go_on_together():
    process = ServerProcess([sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
    assert os.getpgid(process.pid) == os.getpgid(0)
    server = psutil.Process(process.pid)
    wait_until(lambda: len(server.children()) == 1, 30.0)
    assert os.getpgid(server.children()[0].pid) == os.getpgid(0)
    os.kill(process.pid, signal.SIGUSR2)
    assert process._child.wait(30.0) in (0, -9)
    process.close()


LEAVES = """
import os, signal
from multiprocessing import shared_memory
shared_memory._make_filename = lambda: "/" + os.environ["DATAFLOW_VLLM_MARK"] + "_1"
memory = shared_memory.SharedMemory(create=True, size=64)
os.fork()
print(memory.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not SHARED.is_dir(), reason="this machine has no /dev/shm")
def test_what_a_killed_server_leaves_in_shared_memory_goes_with_it_or_at_the_next_start():
    def left(mark: str) -> list[str]:
        return [file.name for file in SHARED.glob(f"*vllm-{mark}*")]

    first = ServerProcess([sys.executable, "-c", LEAVES], os.environ, "first")
    assert first._child.wait(30.0) != 0
    assert left("first") != []
    first.close()
    assert left("first") == []
    (SHARED / "sem.vllm-second-abc").touch()
    ServerProcess([sys.executable, "-c", "pass"], os.environ, "second").close()
    assert left("second") == []
