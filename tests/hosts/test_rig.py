"""Hosts of the rig: what they share, what they do not, and that nothing of them stays."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.hosts import Command, Host, hosts
from rigs.machine import alive, wait_until

Give = Callable[..., list[Host]]

ECHO = """
import socket
listening = socket.create_server(("0.0.0.0", 7))
print("up", flush=True)
while True:
    connection, _ = listening.accept()
    with connection:
        connection.sendall(connection.recv(100))
"""
REACH = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 7), timeout=float(sys.argv[2])) as connection:
        connection.sendall(b"hello")
        print(connection.recv(100).decode())
except OSError as error:
    print(type(error).__name__)
"""
WRITABLE = """
import os
for line in open("/proc/self/mountinfo"):
    fields = line.split()
    place = fields[4]
    if "rw" in fields[5].split(",") and not place.startswith(("/proc", "/sys")):
        os.path.isdir(place) and print(fields[2], place)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def pair(give_hosts: Give, folder: Path) -> list[Host]:
    return give_hosts("a", "b", shared=[folder], disk_bytes=64 << 20, memory_bytes=16 << 20)


@pytest.fixture(scope="module")
def echo(pair: list[Host]) -> Host:
    """The second host, which answers."""
    under_way(pair[1], ECHO)
    return pair[1]


def under_way(host: Host, code: str) -> Command:
    process = host.popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == "up\n"
    return process


def reach(host: Host, other: str, patience_s: float = 2.0) -> str:
    return host.python(REACH, other, patience_s)


def test_hosts_reach_each_other_by_address_and_by_name(pair: list[Host], echo: Host) -> None:
    assert reach(pair[0], echo.address) == "hello"
    assert reach(pair[0], "b") == "hello"
    assert reach(echo, "localhost") == "hello"
    assert reach(pair[0], "localhost") == "ConnectionRefusedError"


def test_no_file_system_that_a_host_may_write_to_is_another_host_s_but_the_shared_folder_s(
    pair: list[Host], folder: Path
) -> None:
    found = [dict(line.split() for line in host.python(WRITABLE).splitlines()) for host in pair]
    common = set(found[0]) & set(found[1])
    assert {found[0][device] for device in common} == {str(folder)}
    assert all({"/", "/dev/shm"} <= set(each.values()) for each in found)


def test_a_cut_link_carries_nothing_until_it_is_mended(pair: list[Host], echo: Host) -> None:
    pair[0].cut()
    assert reach(pair[0], echo.address, 0.3) in ("TimeoutError", "OSError")
    pair[0].mend()
    wait_until(lambda: reach(pair[0], echo.address) == "hello", what="the mended link")


def test_a_killed_host_is_silent_and_another_takes_its_place(give_hosts: Give) -> None:
    a, b = give_hosts("c", "d")
    under_way(b, ECHO)
    pids = b.processes()
    assert reach(a, "d") == "hello" and len(pids) == 2
    b.python("open('/tmp/x', 'w')")
    b.kill()
    assert alive(pids) == [] and b.processes() == []
    assert reach(a, b.address, 0.3) in ("TimeoutError", "OSError")
    b.boot()
    under_way(b, ECHO)
    wait_until(lambda: reach(a, b.address) == "hello", what="the host, booted again")
    assert b.python("import os; print(os.path.exists('/tmp/x'))") == "False"


KEEP = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from rigs.hosts import hosts
with hosts("e", "f") as (e, f):
    e.popen(["sleep", "4321"])
    daemon = "import os, time; os.fork() and os._exit(0); os.setsid(); os.closerange(0, 3)"
    f.run([sys.executable, "-c", daemon + "; time.sleep(1000)"])
    import time
    while len(e.processes()) < 2 or len(f.processes()) < 2:
        time.sleep(0.01)
    print(os.getpid(), e.bridge[2], *e.processes(), *f.processes(), flush=True)
    {{}}
"""


@pytest.mark.parametrize("last", ["sys.stdin.read()", "pass"])
def test_nothing_of_a_host_outlives_the_process_that_made_it(last: str, pair: list[Host]) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    maker = subprocess.Popen(
        [sys.executable, "-c", KEEP.format(last)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert maker.stdout
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) == 6
    if last != "pass":
        assert alive(pids) == pids
        os.kill(maker.pid, signal.SIGKILL)
    maker.communicate(timeout=20)
    wait_until(lambda: not alive(pids), what="the end of all hosts' processes")
    assert Path("/proc/self/mountinfo").read_text() == mounts


def test_hosts_that_cannot_be_had_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Exception, match="hosts need nsenter, setpriv, env, ip, tc"), hosts("a"):
        pass
