"""Hosts on one machine: each has its own network, mounts, processes, names and clock; they share a
bridge, and what folders they are given.

    with hosts("a", "b", shared=[folder]) as (a, b):
        a.run(["python", "-c", "..."])
        b.cut()
"""

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import links

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).parent / "inside.py"
TOOLS = ("nsenter", "setpriv", "env", "ip", "tc")
NETWORK = ipaddress.ip_network("10.77.0.0/24")
DAY_S = 86_400
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc")
USER = ("-U", "--preserve-credentials")
KERNELS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dataflow-rl"


class NoHosts(Exception):
    """Why this machine cannot make hosts."""


def held(enter: Sequence[str], what: str) -> tuple[subprocess.Popen[str], int]:
    """`inside.py` under way, and the process that holds the namespaces it made."""
    command = [*enter, sys.executable, "-I", "-S", str(PROGRAM), str(os.getpid()), what]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    said = process.stdout.readline().strip()
    if said.isdigit():
        return process, int(said)
    end(process)
    raise NoHosts(said.removeprefix("error ") or "the kernel gives no namespaces")


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(10)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            stream.close()


class Command(subprocess.Popen[str]):
    """A command on a host, by the process in front of it, which ends as the command does; signals
    reach the command.
    """

    def send_signal(self, sig: int) -> None:
        for pid in self.inside() or [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)

    def inside(self) -> list[int]:
        """The command's process, by its number on this machine; none when it has ended, or has not
        begun.
        """
        try:
            return [
                int(pid)
                for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            ]
        except OSError:
            return []


@dataclass
class Host:
    """One of them. It is up from `boot` until `kill`, and may be booted again, empty, with its name
    and address.

    ahead_s: by how much its monotonic clocks are ahead of this machine's; 0 where the kernel has no
    time namespaces.
    """

    name: str
    number: int
    ahead_s: int
    bridge: tuple[str, ...]
    given: Mapping[str, Any]
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)
    _first: int = 0
    _started: list[Command] = field(default_factory=list, repr=False)

    @property
    def address(self) -> str:
        return str(NETWORK[self.number])

    @property
    def home(self) -> str:
        return f"/home/{self.name}"

    @property
    def prefix(self) -> tuple[str, ...]:
        """In front of a command that is to run on it, with its home. Ends with the command, and the
        command with it.
        """
        assert self._process, f"host {self.name} is down"
        spaces = (
            "-m",
            "-p",
            "-i",
            "-u",
            "-n",
            *(("-T",) if self.ahead_s else ()),
            *self.given["user"],
        )
        own = (
            "setpriv",
            "--pdeathsig",
            "KILL",
            "env",
            "-C",
            str(ROOT),
            f"HOME={self.home}",
            "TMPDIR=/tmp",
        )
        return ("nsenter", "-t", str(self._first), *spaces, *own)

    def boot(self) -> None:
        assert not self._process, f"host {self.name} is up"
        fields = {**self.given, "name": self.name, "home": self.home, "ahead_s": self.ahead_s}
        try:
            self._process, self._first = held(self.bridge, json.dumps(fields))
            links.plug(self.bridge, self._port, self._first, f"02:00:00:00:00:{self.number:02x}")
            links.address(self._enter_network, f"{self.address}/{NETWORK.prefixlen}")
            assert self._process.stdout
            said = self._process.stdout.readline().strip()
            if said != "ready":
                raise NoHosts(said.removeprefix("error "))
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """All its processes at once; its memory and its link go with them. `cut` it before, and
        nobody hears of it.
        """
        if self._process:
            if self._first and self._process.poll() is None:
                os.kill(self._first, signal.SIGKILL)
                # when all its processes have ended
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(10)
            end(self._process)
            with contextlib.suppress(OSError):  # gone already, with the network that it led to
                links.unplug(self.bridge, self._port)
        for process in self._started:
            end(process)
        self._process, self._first = None, 0
        self._started.clear()

    def popen(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, **more: Any
    ) -> Command:
        """A command on it, in the repository's folder. env: besides a few that every process
        has.
        """
        whole = [*self.prefix, *map(str, command)]
        how = {"text": True, "stdin": subprocess.DEVNULL, **more}
        self._started.append(Command(whole, env=environment(env), **how))
        return self._started[-1]

    def run(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """The same until it ends, with what it printed. TimeoutExpired ends it."""
        with self.popen(command, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            finally:
                self._started.remove(process)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def python(self, code: str, *arguments: object, timeout_s: float = 60.0) -> str:
        """What a few lines print there. AssertionError with their errors, if they fail."""
        done = self.run([sys.executable, "-c", code, *map(str, arguments)], timeout_s=timeout_s)
        assert done.returncode == 0, f"on host {self.name}: {done.stderr}"
        return done.stdout.strip()

    def outside(self, path: Path | str) -> Path:
        """Where this machine finds a file of its."""
        return Path(f"/proc/{self._first}/root", str(path).lstrip("/"))

    def processes(self) -> list[int]:
        """By the numbers that they have on this machine."""
        mine = namespace(self._first) if self._process else None
        numbers = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
        return [pid for pid in numbers if mine is not None and namespace(pid) == mine]

    def cut(self, peer: "Host | None" = None, *, sends: bool = True, receives: bool = True) -> None:
        """Lose what it sends to others, what it receives from them, or both; of one peer alone, if
        that is given.
        """
        both = (("ingress", "dst", sends), ("egress", "src", receives))
        for hook, side, lost in both:
            if lost:
                match = links.EVERYTHING if peer is None else links.of_peer(peer.address, side)
                links.lose(self.bridge, self._port, hook, match)

    def mend(self) -> None:
        """Nothing is lost any more."""
        links.lose_none(self.bridge, self._port)

    def slow(self, mbit_per_s: float | None) -> None:
        """Its link in both directions; None: as fast as it can."""
        links.pace(self.bridge, self._port, mbit_per_s)
        links.pace(self._enter_network, "eth0", mbit_per_s)

    @property
    def _port(self) -> str:
        return f"port{self.number}"

    @property
    def _enter_network(self) -> tuple[str, ...]:
        return ("nsenter", "-t", str(self._first), *self.given["user"], "-n")


def namespace(pid: int) -> str | None:
    """Of processes; None where there is no such process."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None


def environment(more: Mapping[str, str] | None) -> dict[str, str]:
    """What a process on a host is started with: nothing of this machine's homes and folders."""
    few = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return {
        **few,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONDONTWRITEBYTECODE": "1",
        **(more or {}),
    }


@contextlib.contextmanager
def hosts(
    *names: str,
    shared: Sequence[Path] = (),
    visible: Sequence[Path] = (),
    disk_bytes: int = 4 << 30,
    memory_bytes: int = 1 << 30,
) -> Iterator[list[Host]]:
    """So many hosts, gone at the end, also when this process is killed.

    shared: folders that all of them may write, visible: folders that they may read, each at its own
    path. disk_bytes, memory_bytes: of each, for its files and for /dev/shm. NoHosts where they
    cannot be had.
    """
    if missing := [name for name in TOOLS if not shutil.which(name)]:
        raise NoHosts(f"hosts need {', '.join(missing)}, of iproute2 and util-linux")
    with contextlib.ExitStack() as stack:
        keeper, pid = held((), "network")
        stack.callback(end, keeper)
        user = () if Path(f"/proc/{pid}/ns/user").samefile("/proc/self/ns/user") else USER
        enter = ("nsenter", "-t", str(pid), *user, "-n")
        try:
            links.bridge(enter)
        except OSError as error:
            raise NoHosts(f"no bridge can be made: {error}") from None
        python = (Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve())
        seen = within_no_other((*map(Path, SYSTEM), ROOT, *python, KERNELS, *visible))
        given = {
            "user": user,
            "visible": [str(path) for path in seen],
            "shared": [str(path) for path in shared],
            "stage": str(outside((*seen, *shared))),
            "disk_bytes": disk_bytes,
            "memory_bytes": memory_bytes,
            "kernels": str(KERNELS),
            "addresses": [(name, str(NETWORK[number])) for number, name in enumerate(names, 1)],
        }
        time_spaces = Path("/proc/self/ns/time_for_children").exists()
        made = []
        for number, name in enumerate(names, 1):
            made.append(Host(name, number, 3 * number * DAY_S if time_spaces else 0, enter, given))
            stack.callback(made[-1].kill)
            made[-1].boot()
        yield made


def within_no_other(paths: Sequence[Path]) -> list[Path]:
    """Those that are not seen already with one before them."""
    kept: list[Path] = []
    for path in paths:
        if path.exists() and not any(path.is_relative_to(other) for other in kept):
            kept.append(path)
    return kept


def outside(paths: Sequence[Path]) -> Path:
    """A folder that stands on every machine, and where none of these lies."""
    for name in ("/mnt", "/media", "/srv", "/opt"):
        if Path(name).is_dir() and not any(path.is_relative_to(name) for path in paths):
            return Path(name)
    raise NoHosts("none of /mnt, /media, /srv and /opt is free to build a file system in")
