"""Runs in front of a host's processes: makes its namespaces and its file system, then reaps what
ends on it.

    python -I -S inside.py PARENT JSON       a host, in the user namespace it is started in; JSON:
                                             see `Host.boot`
    python -I -S inside.py PARENT network    the user and network namespace in which the bridge
                                             stands

Prints the process that holds the namespaces, then `ready`, or one sentence that begins with
`error`. What it makes ends with it, and it ends with the process that started it, however that
ends.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

NEW_NS, NEW_TIME, NEW_UTS, NEW_IPC = 0x20000, 0x80, 0x4000000, 0x8000000
NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000
NO_SUID, NO_DEV, NO_EXEC, BIND, REC, PRIVATE, DETACH = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000, 0x2
PARENT_DEATH_SIGNAL = 1
MOUNT_SETATTR, RECURSIVE, READ_ONLY = 442, 0x8000, 0x1
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

libc = ctypes.CDLL(None, use_errno=True)


class Attributes(ctypes.Structure):
    """struct mount_attr."""

    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns", ctypes.c_uint64),
    )


def call(what: str, function: Callable[..., int], *arguments: object) -> None:
    """A function of libc; OSError that says what it was for."""
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


@contextlib.contextmanager
def said() -> Iterator[None]:
    """What goes wrong within is one sentence."""
    try:
        yield
    except OSError as error:
        print(f"error {error.strerror}", flush=True)
        os._exit(1)


def die_with(parent: int) -> None:
    """SIGKILL when the process that started this one ends; at once where it has."""
    libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def unshare(flags: int) -> None:
    call("new namespaces", libc.unshare, flags)


def mount(source: str, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
    target.mkdir(parents=True, exist_ok=True)
    call(
        f"{kind} on {target}",
        libc.mount,
        source.encode(),
        bytes(target),
        kind.encode(),
        flags,
        options.encode(),
    )


def bind(source: Path, target: Path, writable: bool = False) -> None:
    """The same folder or file in another place, with all that is mounted in it."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    call(f"{source} on {target}", libc.mount, bytes(source), bytes(target), None, BIND | REC, None)
    if not writable:
        how = Attributes(set=READ_ONLY)
        size = ctypes.c_size_t(ctypes.sizeof(how))
        call(
            f"{target} read-only",
            libc.syscall,
            MOUNT_SETATTR,
            -100,
            bytes(target),
            RECURSIVE,
            ctypes.byref(how),
            size,
        )


def file_system(root: Path, given: dict) -> None:  # type: ignore[type-arg]
    """The host's own, in memory, at `root`; of the outside only what it is given."""
    call("mounts of its own", libc.mount, b"none", b"/", None, REC | PRIVATE, None)
    mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEV, f"mode=755,size={given['disk_bytes']}")
    for each in map(Path, given["visible"]):
        if each.is_symlink():
            (root / each.relative_to("/")).symlink_to(each.readlink())
        elif each.exists():
            bind(each, root / each.relative_to("/"))
    for each in map(Path, given["shared"]):
        bind(each, root / each.relative_to("/"), writable=True)
    for name in DEVICES:
        bind(Path("/dev", name), root / "dev" / name, writable=True)
    for name, to in (
        ("fd", "self/fd"),
        ("stdin", "self/fd/0"),
        ("stdout", "self/fd/1"),
        ("stderr", "self/fd/2"),
    ):
        (root / "dev" / name).symlink_to(f"/proc/{to}")
    mount(
        "tmpfs",
        root / "dev/shm",
        "tmpfs",
        NO_SUID | NO_DEV,
        f"mode=1777,size={given['memory_bytes']}",
    )
    mount("proc", root / "proc", "proc", NO_SUID | NO_DEV | NO_EXEC)
    try:
        mount("sysfs", root / "sys", "sysfs", NO_SUID | NO_DEV | NO_EXEC)
    except OSError:  # a container may hide parts of it, and then gives no other
        bind(Path("/sys"), root / "sys")
    for folder in ("tmp", "var/tmp", "run"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder).chmod(0o1777)
    home = root / given["home"].lstrip("/")
    home.mkdir(parents=True)
    home.chmod(0o700)
    compiled = home / ".cache/dataflow-rl"
    compiled.mkdir(parents=True)
    # a host that has run before has compiled them
    for kernel in Path(given["kernels"]).glob("*.so"):
        (compiled / kernel.name).symlink_to(kernel)
    names = root / "run/hosts"
    names.write_text(
        "127.0.0.1 localhost\n"
        + "".join(f"{address} {name}\n" for name, address in given["addresses"])
    )
    bind(names, root / "etc/hosts")


def become_host(given: dict) -> None:  # type: ignore[type-arg]
    """In the first process of the host."""
    os.umask(0o022)
    root = Path(given["stage"])
    file_system(root, given)
    call("host name", libc.sethostname, given["name"].encode(), len(given["name"].encode()))
    os.chdir(root)
    call("root", libc.pivot_root, b".", b".")
    call("the outside gone", libc.umount2, b".", DETACH)
    os.chdir("/")


def reap_for_ever() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigwait({signal.SIGCHLD})


def host(given: dict) -> None:  # type: ignore[type-arg]
    """Ends when the host's first process has."""
    unshare(NEW_NS | NEW_PID | NEW_IPC | NEW_UTS | NEW_NET | (NEW_TIME if given["ahead_s"] else 0))
    if given["ahead_s"]:
        offsets = f"monotonic {given['ahead_s']} 0\nboottime {given['ahead_s']} 0\n"
        Path("/proc/self/timens_offsets").write_text(offsets)
    alive, held = os.pipe()
    first = os.fork()
    if first:
        print(first, flush=True)
        os.waitpid(first, 0)
        return
    os.close(held)
    die_with(0)  # which is how a process outside the PID namespace is called, ended or not
    if select.select([alive], [], [], 0)[0]:
        sys.exit(1)
    with said():
        become_host(given)
    print("ready", flush=True)
    for standard in (0, 1):
        os.dup2(os.open("/dev/null", os.O_RDWR), standard)
    reap_for_ever()


def network(parent: int) -> None:
    """Holds the user and network namespace of the bridge. As root without user namespaces, the
    network alone.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        unshare(NEW_USER | NEW_NET)
    except OSError:
        unshare(NEW_NET)
    else:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    die_with(parent)  # new rights have made it forget
    print(os.getpid(), flush=True)
    print("ready", flush=True)
    signal.pause()


def main() -> None:
    parent = int(sys.argv[1])
    die_with(parent)
    with said():
        if sys.argv[2] == "network":
            network(parent)
        else:
            host(json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
