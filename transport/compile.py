"""Compiles C files for this machine's processor, or the one asked for, once, and loads them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import itertools
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TIMEOUT_S = 120.0
_LOOK_S = 0.1
_AT_HOME = "dataflow-rl"
PROCESSOR = "DATAFLOW_MARCH"
"""The variable that names the processor to compile for, as the compiler's -march does; `none`: as
if there were no compiler. Unset, it is this machine's own."""


STARTING = "starting: "
"""Of a line that tells what a process does before it is at work, which somebody waits for."""
NOTES: list[str] = []
"""What people should know of the kernels in this process: where they are off, or slower than they
could be."""
_Flags = tuple[str, ...]


def cache_folder() -> Path:
    """Where what this user's processes make once lies: in the cache of his home folder, or, where
    nothing can be written there, as in an image that somebody else has built, among the machine's
    temporary files.
    """
    folders = list(_folders())
    return next(filter(_takes_files, folders), folders[0])


def _folders() -> Iterator[Path]:
    """The best first."""
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _AT_HOME
    with contextlib.suppress(FileNotFoundError):
        yield Path(tempfile.gettempdir()) / f"dataflow-rl-{os.getuid()}"
    yield Path("/tmp") / f"dataflow-rl-{os.getuid()}"


def compilers_caches() -> dict[str, str]:
    """The variables that have Triton and TorchInductor keep theirs there, too, where the home
    folder takes none.
    """
    folder = cache_folder()
    if folder.name == _AT_HOME:
        return {}
    return {
        name: os.environ.get(name) or str(folder / kind)
        for name, kind in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor"))
    }


@functools.cache
def compiled(sources: tuple[Path, ...], choices: tuple[_Flags, ...]) -> ctypes.CDLL | None:
    """The shared library of C files, from a cache folder if it was compiled before.

    sources: the first is compiled; it includes the others. choices: flags to try one after the
    other, for not every compiler knows OpenMP. None where there is no C compiler or it cannot build
    them, which is told in `NOTES`. ValueError where it cannot build them for the processor that
    DATAFLOW_MARCH names.
    """
    target = os.environ.get(PROCESSOR)
    if target == "none":
        return None
    preferred = os.environ.get("CC", "cc")
    compiler = shutil.which(preferred) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _off(
            f"there is no C compiler: neither {preferred} nor gcc nor clang is on the PATH;"
            " install one"
        )
        return None
    fault = ""
    for processor, flags in itertools.product(
        ((f"-march={target}",),) if target else (("-march=native",), ()), choices
    ):
        try:
            lib = _library(sources, compiler, ("-fPIC", "-shared", *processor, *flags))
        except subprocess.TimeoutExpired:
            _off(
                f"{compiler} has not compiled {sources[0].name} within {TIMEOUT_S:.0f} s; start the"
                " run again"
            )
            return None
        except (OSError, subprocess.SubprocessError) as error:
            fault = (
                str(getattr(error, "stderr", None) or error).strip().splitlines() or [repr(error)]
            )[0][:300]
            continue
        if flags != choices[0]:
            _note(
                f"{compiler} compiles {sources[0].name} with {flags[-1]} alone, and it is slower:"
                f" {fault}"
            )
        return lib
    if target:
        raise ValueError(
            f"{sources[0].name} cannot be compiled for {PROCESSOR}={target}; found {fault}; name a"
            f" processor that {compiler} knows as -march, or none"
        )
    _off(
        f"{compiler} cannot compile {sources[0].name}: {fault}; see that it works, and where it may"
        " write"
    )
    return None


def _library(sources: tuple[Path, ...], compiler: str, flags: _Flags) -> ctypes.CDLL:
    """Errors: OSError, SubprocessError."""
    identity = "\n".join(
        [*(source.read_text("utf-8") for source in sources), compiler, *flags, _processor()]
    )
    name = f"{sources[0].stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    for folder in filter(_is_ours, _folders()):
        # there is none, or it is damaged, or nothing may be run from there
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(folder / name))
    fault = OSError(f"nothing can be written to {' or '.join(dict.fromkeys(map(str, _folders())))}")
    for folder in filter(_takes_files, _folders()):
        try:
            with _alone(folder):
                return _built(folder / name, [compiler, *flags, str(sources[0])])
        except OSError as error:  # a full disk, or one from which nothing may be run
            fault = error
    raise fault


def _built(found: Path, command: list[str]) -> ctypes.CDLL:
    with contextlib.suppress(OSError):  # another process was faster
        return ctypes.CDLL(str(found))
    print(f"{STARTING}{command[0]} compiles {found.stem}, once for this processor", file=sys.stderr)
    handle, fresh = tempfile.mkstemp(suffix=".so", dir=found.parent)
    os.close(handle)
    try:
        subprocess.run(
            [*command, "-o", fresh, "-lm"],
            check=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, "TMPDIR": str(found.parent)},
        )
        library = ctypes.CDLL(fresh)
        Path(fresh).replace(found)
    finally:
        Path(fresh).unlink(missing_ok=True)
    print(f"{STARTING}{found} is compiled", file=sys.stderr)
    return library


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While other processes of this user wait, that would compile the same; not for ever, and not
    where a disk has no locks.
    """
    deadline = time.monotonic() + TIMEOUT_S
    handle = os.open(folder, os.O_RDONLY)
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK_S)
            except OSError:
                break
        yield
    finally:
        os.close(handle)


def _takes_files(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return _is_ours(folder)
    except OSError:
        return False


def _is_ours(folder: Path) -> bool:
    """Whether code from there may be run: nobody else could put some into it. Above a cache of
    one's own nobody can.
    """
    try:
        status = folder.lstat()
    except OSError:
        return False
    shared = folder.name != _AT_HOME
    return not shared or (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    )


def _off(why: str) -> None:
    _note(f"kernels in C are off, and slower ways are taken: {why}")


def _note(text: str) -> None:
    if text not in NOTES:
        NOTES.append(text)
        print(text, file=sys.stderr)


def _processor() -> str:
    """What tells processors apart that need other machine code."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return " ".join(os.uname())
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    )
