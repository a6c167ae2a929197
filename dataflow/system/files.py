"""Files that are whole or not there: atomic writes, strict JSON, errors that say what the disk
said; and files that a run can do without.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

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


# Files that a run can do without, that is all but ledger, rollouts and checkpoints: what the disk
# refuses is told, once for each file, and what is missing, torn or broken counts as not there.


Tell: TypeAlias = Callable[[str], object]
"""Takes a sentence for the user or the log."""

Kind: TypeAlias = type | tuple[type, ...]
_LONGEST = 16 << 20
"""Bytes of a line."""
warn: Tell = logging.getLogger(__name__).warning


@dataclass(eq=False)
class Extras:
    """Writes such files for one process."""

    tell: Tell = warn
    _refused: set[Path] = field(default_factory=set)
    """Those of which it was told that the disk refuses them; each may be told again once it was
    taken."""

    def write(self, path: Path, content: str | bytes, *, flush: bool = False) -> bool:
        """Put the content at `path`, whole or not at all; whether the disk took it."""
        encoded = content.encode() if isinstance(content, str) else content
        return self.attempt(
            path, lambda: write_atomically(path, lambda file: file.write(encoded), flush=flush)
        )

    def append(self, path: Path, line: str) -> bool:
        """Append one line; whether the disk took it."""
        return self.attempt(path, lambda: append_line(path, line))

    def remove(self, path: Path) -> bool:
        """Remove the file if it is there; whether the disk let it go."""
        return self.attempt(path, lambda: path.unlink(missing_ok=True), "removing")

    def rename(self, path: Path, to: Path) -> bool:
        """Give it another name; whether it has that."""
        return self.attempt(path, lambda: path.replace(to), "renaming")

    def attempt(self, path: Path, act: Callable[[], object], doing: str = "writing") -> bool:
        """Do something to `path`; whether the disk let it."""
        try:
            with disk(doing, path):
                act()
        except RunFolderError as error:
            if path not in self._refused:
                self._refused.add(path)
                self.tell(f"{error}; the run goes on without it")
            return False
        self._refused.discard(path)
        return True


def read_text(path: Path, tell: Tell = warn) -> str:
    """The text of a file; none where it is missing or cannot be read."""
    try:
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        tell(f"'{path}' cannot be read: {error.strerror or error}; it counts as missing")
        return ""


def read_map(
    path: Path, kinds: Mapping[str, Kind] | None = None, tell: Tell = warn
) -> dict[str, Any]:
    """The JSON map in a file; an empty one where it is missing or is none. kinds: of values; others
    are left out.
    """
    text = read_text(path, tell)
    try:
        values = json.loads(text) if text else {}
    except ValueError as error:
        tell(f"'{path}' is not JSON: {error}; it counts as missing")
        return {}
    if not isinstance(values, dict):
        tell(f"'{path}' holds no JSON map but a {type(values).__name__}; it counts as missing")
        return {}
    wrong = [
        name
        for name, kind in (kinds or {}).items()
        if name in values and not isinstance(values[name], kind)
    ]
    if wrong:
        tell(
            f"'{path}' has values of other types than were written: {wrong}; they count as missing"
        )
    return {name: value for name, value in values.items() if name not in wrong}


def read_lines(path: Path, tell: Tell = warn) -> tuple[list[dict[str, Any]], int]:
    """The JSON maps in a file of one a line, and how many lines are torn or none; none where it is
    missing.
    """
    lines: list[dict[str, Any]] = []
    torn = 0
    for text in read_text(path, tell).split("\n"):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict):
            lines.append(line)
        elif text.strip():
            torn += 1
    return lines, torn


def stream_lines(path: Path, start: int, tell: Tell = warn) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON maps in a file of one a line, from a byte on: each with the byte where the next
    begins; no torn one.

    It ends before a line that is longer than any that a run writes.
    """
    try:
        with path.open("rb") as stream:
            stream.seek(start)
            for text in iter(lambda: stream.readline(_LONGEST), b""):
                if not text.endswith(b"\n"):
                    return
                start += len(text)
                with contextlib.suppress(ValueError):
                    if isinstance(line := json.loads(text), dict):
                        yield start, line
    except FileNotFoundError:
        return
    except OSError as error:
        tell(f"'{path}' cannot be read: {error.strerror or error}; it counts as missing")
