"""Hosts of the rig: what they share, what they do not, and that nothing of them stays."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rigs.hosts import Command, Host, NoHosts, hosts, opened
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
DATAGRAMS = """
import socket
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.bind(("0.0.0.0", 9))
print("up", flush=True)
while True:
    print(here.recv(100).decode(), flush=True)
"""
SEND = """
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], 9))
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


def test_hosts_do_not_reach_the_machine_around_them(pair: list[Host]) -> None:
    assert sorted(pair[0].python("import os; print(*os.listdir('/sys/class/net'))").split()) == [
        "eth0",
        "lo",
    ]
    with socket.create_server(("0.0.0.0", 0)) as server:
        reached = [reach(pair[0], address) for address in ("192.0.2.1", *addresses())]
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert set(reached) == {"OSError"}


def addresses() -> list[str]:
    """Of this machine, but for loopback."""
    every = (
        each
        for of in psutil.net_if_addrs().values()
        for each in of
        if each.family == socket.AF_INET
    )
    return [each.address for each in every if not each.address.startswith("127.")]


def test_what_a_host_has_in_its_own_folders_no_other_can_open(pair: list[Host]) -> None:
    a, b = pair
    places = ["/tmp/x", "/var/tmp/x", "/dev/shm/x", f"{a.home}/x", "/x"]
    a.python("import sys; [open(place, 'w').write('mine') for place in sys.argv[1:]]", *places)
    assert (
        a.python(
            "import sys; print(*(open(place).read() for place in sys.argv[1:]))", *places
        ).split()
        == ["mine"] * 5
    )
    assert (
        b.python("import os, sys; print(*map(os.path.exists, sys.argv[1:]))", *places).split()
        == ["False"] * 5
    )


def test_no_file_system_that_a_host_may_write_to_is_another_host_s_but_the_shared_folder_s(
    pair: list[Host], folder: Path
) -> None:
    found = [dict(line.split() for line in host.python(WRITABLE).splitlines()) for host in pair]
    common = set(found[0]) & set(found[1])
    assert {found[0][device] for device in common} == {str(folder)}
    assert all({"/", "/dev/shm"} <= set(each.values()) for each in found)


def test_a_shared_folder_is_the_same_on_all_hosts(pair: list[Host], folder: Path) -> None:
    pair[0].python("import sys; open(sys.argv[1], 'w').write('ours')", folder / "note")
    assert pair[1].python("import sys; print(open(sys.argv[1]).read())", folder / "note") == "ours"
    assert (folder / "note").read_text() == "ours"


def test_who_opens_a_file_of_the_shared_folder_is_known_by_host(
    pair: list[Host], folder: Path
) -> None:
    write, read = (
        "import sys; open(sys.argv[1], 'a').write('x')",
        "import sys; open(sys.argv[1]).read()",
    )
    try:
        with opened(pair, folder) as watch:
            pair[0].python(write, folder / "mine")
            pair[1].python(write, folder / "yours")
            pair[1].python(read, folder / "mine")
            pair[0].python(write, folder / "both")
            pair[1].python(write, folder / "both")
            (folder / "mine").read_text()
    except NoHosts as error:
        pytest.skip(str(error))
    assert watch.writers() == {"mine": {"a"}, "yours": {"b"}, "both": {"a", "b"}}
    assert watch.seen == {"a": {"mine", "both"}, "b": {"mine", "yours", "both"}}


def test_the_repository_and_the_interpreter_are_there_to_read_only(pair: list[Host]) -> None:
    found = pair[0].python(
        "import importlib.util as known; print(known.find_spec('dataflow').origin)"
    )
    assert found == str(Path(__file__).parents[2] / "dataflow/__init__.py")
    for place in (Path(__file__).parent, Path(sys.prefix), Path("/etc")):
        assert "Read-only" in pair[0].run(["touch", place / "x"]).stderr
    assert pair[0].run(["ls", Path.home() / ".ssh"]).returncode != 0


def test_processes_of_a_host_see_none_of_another(pair: list[Host]) -> None:
    sleeping = pair[0].popen(["sleep", "3210"])
    wait_until(lambda: "3210" in pair[0].run(["cat", *commands(pair[0])]).stdout)
    assert "3210" not in pair[1].run(["cat", *commands(pair[1])]).stdout
    here = {namespace_pid(pid) for pid in pair[0].processes()}
    sleeping.kill()
    sleeping.wait()
    wait_until(lambda: len(pair[0].processes()) < len(here), what="the end of what ran there")


def commands(host: Host) -> list[str]:
    numbers = host.python(
        "import os; print(*(pid for pid in os.listdir('/proc') if pid.isdigit()))"
    ).split()
    return [f"/proc/{pid}/cmdline" for pid in numbers]


def namespace_pid(pid: int) -> str:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid"))


def test_monotonic_clocks_are_days_apart(pair: list[Host]) -> None:
    if not pair[0].ahead_s:
        pytest.skip("this kernel has no time namespaces")
    a, b = (float(host.python("import time; print(time.monotonic())")) for host in pair)
    assert b - a == pytest.approx(pair[1].ahead_s - pair[0].ahead_s, abs=60) and b - a > 86_400
    assert a - time.monotonic() == pytest.approx(pair[0].ahead_s, abs=60)


def test_a_host_has_its_own_name_and_home(pair: list[Host]) -> None:
    ask = "import os, socket; print(socket.gethostname(), os.path.expanduser('~'))"
    assert [host.python(ask) for host in pair] == ["a /home/a", "b /home/b"]


def test_a_disk_can_be_full(pair: list[Host]) -> None:
    assert (
        "No space left"
        in pair[0].run(["dd", "if=/dev/zero", "of=/tmp/large", "bs=1M", "count=100"]).stderr
    )
    pair[0].run(["rm", "/tmp/large"])


def test_a_cut_link_carries_nothing_until_it_is_mended(pair: list[Host], echo: Host) -> None:
    pair[0].cut()
    assert reach(pair[0], echo.address, 0.3) in ("TimeoutError", "OSError")
    pair[0].mend()
    wait_until(lambda: reach(pair[0], echo.address) == "hello", what="the mended link")


def test_a_cut_in_one_direction_loses_only_what_goes_there(pair: list[Host]) -> None:
    a, b = pair
    a_hears, b_hears = (under_way(host, DATAGRAMS).stdout for host in pair)
    assert a_hears and b_hears
    a_loses, b_loses = (a, b, b_hears), (b, a, a_hears)  # what is sent, and who would hear it
    for cut, (sender, receiver, would_hear), (other, _, hears) in (
        (lambda: a.cut(receives=False), a_loses, b_loses),
        (lambda: a.cut(sends=False), b_loses, a_loses),
        (lambda: a.cut(b, receives=False), a_loses, b_loses),
        (lambda: a.cut(b, sends=False), b_loses, a_loses),
    ):
        cut()
        sender.python(SEND, receiver.address, "lost")
        other.python(SEND, sender.address, "comes")
        assert hears.readline() == "comes\n"
        a.mend()
        sender.python(SEND, receiver.address, "mended")
        assert would_hear.readline() == "mended\n"


@pytest.mark.slow
def test_a_slow_link_takes_its_time(pair: list[Host], echo: Host) -> None:
    ask = """
import socket, sys, time
begin = time.monotonic()
with socket.create_server(("0.0.0.0", 8)) as server:
    print("up", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
print(time.monotonic() - begin)
"""
    send = "import socket, sys; socket.create_connection((sys.argv[1], 8)).sendall(bytes(1 << 20))"
    took = []
    for mbit_per_s in (8.0, None):
        pair[0].slow(mbit_per_s)
        receiving = under_way(echo, ask)
        pair[0].python(send, echo.address)
        took.append(float(receiving.communicate(timeout=30)[0]))
    assert took[0] > 0.7 > took[1]  # seconds, for a MiB


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


def test_a_command_ends_with_the_process_that_asked_for_it(pair: list[Host]) -> None:
    process = under_way(pair[0], "print('up', flush=True); import time; time.sleep(1000)")
    before = set(pair[0].processes())
    process.kill()
    process.wait()
    wait_until(
        lambda: len(set(pair[0].processes()) & before) == len(before) - 1,
        what="the end of the command",
    )


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "who",
    [
        pytest.param(("--map-user=1000", "--map-group=1000"), id="a user without rights"),
        pytest.param(("--map-root-user",), id="root where users make no namespaces"),
    ],
)
def test_hosts_need_either_user_namespaces_or_root(who: tuple[str, ...], pair: list[Host]) -> None:
    limit = "echo 0 >/proc/sys/user/max_user_namespaces; " if "--map-root-user" in who else ""
    shell = shutil.which("sh") or "sh"
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from rigs.hosts import hosts
with hosts("g", "h") as (g, h):
    print(g.python("print('from g')"), h.given["user"])
"""
    done = subprocess.run(
        [
            "unshare",
            "--user",
            *who,
            shell,
            "-c",
            f'{limit}exec "$@"',
            shell,
            sys.executable,
            "-c",
            program,
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.strip() == f"from g {() if limit else ('-U', '--preserve-credentials')}", (
        done.stderr
    )


def test_hosts_that_cannot_be_had_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Exception, match="hosts need nsenter, setpriv, env, ip, tc"), hosts("a"):
        pass
