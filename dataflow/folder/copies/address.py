"""A place for files that any `pyarrow.fs.FileSystem` knows, a folder or an object store; refusals
in one sentence.
"""

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import pyarrow as pa
import xxhash
from pyarrow import fs

from dataflow.errors import GraphError, RunError
from dataflow.system.files import RunFolderError, flush_to_disk, to_json, write_atomically

CHUNK_BYTES = 4 << 20
Moved = Callable[[int], object]
"""Hears of bytes that went or came."""


class CopyError(RunError):
    """An address did not take, or give, what it should; it may later."""


@dataclass(frozen=True)
class Address:
    """One folder there; names below it have slashes."""

    text: str
    """For people."""
    files: fs.FileSystem = field(repr=False, compare=False)
    """Of that folder."""
    local: Path | None = None
    """Where it is a folder of this machine: what is written is brought to the disk itself."""

    @classmethod
    def of(cls, text: str) -> "Address":
        """What `pyarrow.fs.FileSystem.from_uri` takes, or a path. Errors: GraphError for what it
        does not know.
        """
        text = checked(text)
        try:
            system, path = fs.FileSystem.from_uri(text)
        except (OSError, pa.ArrowException, ValueError, TypeError) as error:
            raise GraphError(
                f"checkpoints cannot go to '{text}': {_said(error)}; give a path, or an address as"
                " pyarrow.fs knows them, such as s3://bucket/folder"
            ) from error
        local = Path(path) if isinstance(system, fs.LocalFileSystem) else None
        return cls(text, fs.SubTreeFileSystem(path, system), local)

    def below(self, name: str) -> "Address":
        """A folder in it."""
        local = None if self.local is None else self.local / name
        return Address(joined(self.text, name), fs.SubTreeFileSystem(name, self.files), local)

    @property
    def name(self) -> str:
        """The last of its path."""
        return self.text.partition("?")[0].rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> "Address":
        """The folder that it is in."""
        place, mark, how = self.text.partition("?")
        return Address.of(place.rstrip("/").rpartition("/")[0] + mark + how)

    def names(self, folder: str = "") -> list[str]:
        """Of what is in a folder; none where there is no such folder."""
        with self._said("looking into", folder):
            found = self.files.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        return sorted(each.base_name for each in found)

    def put(
        self, name: str, source: IO[bytes], moved: Moved = lambda count: None
    ) -> dict[str, Any]:
        """Write a file; its facts, as a commit marker has them."""
        digest, size = xxhash.xxh3_64(), 0
        with self._said("writing", name):
            if folder := name.rpartition("/")[0]:
                self.files.create_dir(folder, recursive=True)
            elif self.local is not None:
                self.files.create_dir("", recursive=True)
            with self.files.open_output_stream(name) as out:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
                    size += len(chunk)
                    moved(len(chunk))
            self._flush(name)
        return {"bytes": size, "xxh3_64": digest.hexdigest()}

    def get(self, name: str, into: Path, moved: Moved = lambda count: None) -> dict[str, Any]:
        """Bring a file here; its facts. Errors: CopyError; OSError of this machine's disk."""
        digest, size = xxhash.xxh3_64(), 0
        into.parent.mkdir(parents=True, exist_ok=True)
        with into.open("wb") as out:
            with self._said("reading", name), self.files.open_input_stream(name) as source:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
                    size += len(chunk)
                    moved(len(chunk))
            out.flush()
            os.fsync(out.fileno())
        return {"bytes": size, "xxh3_64": digest.hexdigest()}

    def put_json(self, name: str, value: Any) -> None:
        """Write a small file, in the place of one that is there; in a folder of this machine all of
        it or nothing.
        """
        content = to_json(value, indent=1).encode()
        if self.local is None:
            self.put(name, io.BytesIO(content))
            return
        path = self.local / name
        with self._said("writing", name):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_atomically(path, lambda file: file.write(content))
        except RunFolderError as error:
            raise CopyError(str(error)) from error

    def get_json(self, name: str) -> dict[str, Any]:
        """A small file; empty where it is missing, removed at this moment, or torn."""
        content = b""
        with self._said("reading", name), contextlib.suppress(FileNotFoundError):
            if self.files.get_file_info(name).type == fs.FileType.File:
                with self.files.open_input_stream(name) as source:
                    content = source.read()
        with contextlib.suppress(ValueError):
            found = json.loads(content)
            return found if isinstance(found, dict) else {}
        return {}

    def remove(self, name: str) -> None:
        """Remove a file or a folder; what is gone already is well."""
        with self._said("removing", name), contextlib.suppress(FileNotFoundError):
            kind = self.files.get_file_info(name).type
            if kind == fs.FileType.Directory:
                self.files.delete_dir(name)
            elif kind == fs.FileType.File:
                self.files.delete_file(name)

    def _flush(self, name: str) -> None:
        if self.local is not None:
            flush_to_disk(self.local / name)
            flush_to_disk((self.local / name).parent)

    @contextlib.contextmanager
    def _said(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException, ValueError) as error:
            raise CopyError(
                f"{doing} '{joined(self.text, name)}' failed: {_said(error)}"
            ) from error


def checked(text: str) -> str:
    """An address as it is written down, the same however it is given: a path is made whole, a slash
    at its end goes. Errors: GraphError for one that holds a password.
    """
    if is_folder(text):
        return str(Path(urlsplit(text).path if "://" in text else text).absolute())
    if (given := urlsplit(text)).password is not None:
        raise GraphError(
            f"'{given.scheme}://...@{given.hostname}' holds a password, which would stand in the"
            " run folder; leave it out, and give it as the file system's client reads it (for S3"
            " AWS_SECRET_ACCESS_KEY)"
        )
    return joined(text, "")


def is_folder(text: str) -> bool:
    """Whether an address is a folder that this machine sees."""
    return "://" not in text or text.startswith("file://")


def is_own(text: str) -> bool:
    """Whether an address is a folder of this user's on this machine."""
    path = Path(checked(text))
    return is_folder(text) and path.exists() and path.stat().st_uid == os.getuid()


def joined(text: str, name: str) -> str:
    """An address below another one; what follows a question mark is for the file system, and stays
    at the end.
    """
    place, mark, how = text.partition("?")
    return f"{place.rstrip('/')}/{name}".rstrip("/") + mark + how


def _said(error: BaseException) -> str:
    """The first line of what a file system says, which may be a page."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).strip().splitlines()[0].rstrip(".")
