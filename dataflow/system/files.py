"""Files that are whole or not there: atomic writes, strict JSON, and errors that say what the disk
said.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dataflow.errors import RunError

_ADVICE = {
    errno.EACCES: "give this user write permission there, or name another folder",
    errno.EPERM: "give this user write permission there, or name another folder",
    errno.EROFS: "that file system is read-only: name another folder",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENOENT: "look whether the folder was moved or deleted while the run used it",
    errno.EEXIST: "move away what stands there",
    errno.EISDIR: "move that folder away",
    errno.ENOTDIR: "move the file that stands where a folder is needed",
}

_TAIL_BYTES = 1 << 18


class RunFolderError(RunError):
    """The run folder cannot be written or read as it should; the message names the file and the way
    out.
    """


@contextlib.contextmanager
def disk(
    doing: str, path: Path, then: str = "then resume: what was written before is whole"
) -> Iterator[None]:
    """Turn what the operating system says about `path` into a RunFolderError. then: what to do once
    a full disk has room again.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunFolderError(
            f"{doing} '{path}' failed: {reason}; {_advice(error, path, then)}"
        ) from error


def write_atomically(
    path: Path, write: Callable[[BinaryIO], object], *, what: str = "writing", flush: bool = True
) -> None:
    """Let `write` fill a new file and put it at `path` in one step.

    Whatever happens to this process, `path` holds either all of the new content or what it held
    before; with `flush` (milliseconds: it waits for the disk) also when the power is cut. Errors:
    RunFolderError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk(what, path):
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                if flush:
                    os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        if flush:
            flush_to_disk(path.parent)


@contextlib.contextmanager
def only_told(said: list[str]) -> Iterator[None]:
    """For what is no reason to end a run when the disk refuses it: the error is told, and that is
    all.
    """
    try:
        yield
    except RunFolderError as error:
        said.append(str(error))


def flush_to_disk(path: Path) -> None:
    """Make the content of a file, or the names inside a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append_line(path: Path, line: str) -> None:
    """Append one line in one write, after ending a line that a crash tore. Errors:
    RunFolderError.
    """
    with disk("appending to", path):
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            content = (b"\n" if torn else b"") + line.encode() + b"\n"
            written = os.write(handle, content)
            if written < len(content):
                raise OSError(errno.ENOSPC, f"only {written} of {len(content)} bytes were taken")
        finally:
            os.close(handle)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON of numbers, text, lists, dicts, dataclasses, paths, arrays; NaN and infinities
    are null.
    """
    return json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def plain(value: Any) -> Any:
    """The value in the types that JSON knows. Errors: TypeError for anything else."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(inner) for inner in value), key=str)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, msgspec.Struct):
        return plain(msgspec.structs.asdict(value))
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(
        f"a {type(value).__name__} cannot stand in JSON, but {value!r} was given; "
        f"give numbers, text, lists, dicts or arrays"
    )


def _advice(error: OSError, path: Path, then: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"make room on that disk ({_free(path)}), {then}"
    return _ADVICE.get(error.errno or 0, "look at the disk and its log")


def _free(path: Path) -> str:
    with contextlib.suppress(OSError):
        return f"{shutil.disk_usage(path.parent).free / 2**20:,.0f} MiB are free"
    return "its free space is unknown"


def tail(path: Path, after: int = 0) -> str:
    """The end of a file, from byte `after` on; empty where there is none."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(after, size - _TAIL_BYTES))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
