"""Copies of checkpoints at an address that `pyarrow.fs` knows: a folder, or an object store.

    ADDRESS/RUN/part-000001/claim-TOKEN.json
    ADDRESS/RUN/part-000001/checkpoints/[TRAINER/]step-000100/...

Each process that takes the run up from there has a part of its own, with a number. So two that
cannot see each other do not spoil each other's copies, and one that finds a part above its own was
replaced. A copy is whole from the moment on at which its marker is there.
"""

import contextlib
import io
import json
import os
import re
import secrets
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import xxhash
from pyarrow import fs

from dataflow.errors import GraphError, RunError
from dataflow.folder.checkpoints import MARKER, TEMPORARY
from dataflow.system.files import RunFolderError, flush_to_disk, to_json, write_atomically

CHUNK_BYTES = 4 << 20
CONFIG = "checkpoint_to"
"""In what the ledger says of a run."""
LEDGER = "ledger.db.zst"
"""Beside a checkpoint's files: the ledger as it was when they were copied, or later than their
step."""
Moved = Callable[[int], object]
"""Hears of bytes that went or came."""
_PART = re.compile(r"part-(\d+)")
_STEP = re.compile(r"step-(\d{6,})")
_CLAIM = "claim-"
_SECRET = re.compile(r"secret|password|token|^sig$", re.IGNORECASE)
"""Options of an address that are as good as a password."""


class CopyError(RunError):
    """An address did not take, or give, what it should; it may later."""


class TakenUp(RunError):
    """A run was taken up from its address by another process, which has it from then on."""


@dataclass(frozen=True)
class Address:
    """One folder there; names below it have slashes. Its methods raise CopyError."""

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
                f"checkpoints cannot go to '{text}': {_reason(error)}; give a path, or an address"
                " as pyarrow.fs knows them, such as s3://bucket/folder"
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
        return _split(self.text)[0].rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> "Address":
        """The folder that it is in."""
        path, options = _split(self.text)
        return Address.of(path.rstrip("/").rpartition("/")[0] + options)

    def names(self) -> list[str]:
        """Of what is in the folder; none where there is no such folder."""
        with self._errors("looking into", ""):
            infos = self.files.get_file_info(fs.FileSelector("", allow_not_found=True))
        return sorted(info.base_name for info in infos)

    def put(
        self, name: str, source: IO[bytes], moved: Moved = lambda count: None
    ) -> dict[str, Any]:
        """Write a file in a folder below; its facts, as a commit marker has them."""
        with self._errors("writing", name):
            self.files.create_dir(name.rpartition("/")[0], recursive=True)
            with self.files.open_output_stream(name) as out:
                facts = _copied(source, out, moved)
            if self.local is not None:
                flush_to_disk(self.local / name)
                flush_to_disk((self.local / name).parent)
        return facts

    def get(self, name: str, into: Path, moved: Moved = lambda count: None) -> dict[str, Any]:
        """Bring a file here; its facts. Errors: OSError of this machine's disk."""
        into.parent.mkdir(parents=True, exist_ok=True)
        with into.open("wb") as out:
            with self._errors("reading", name), self.files.open_input_stream(name) as source:
                facts = _copied(source, out, moved)
            out.flush()
            os.fsync(out.fileno())
        return facts

    def put_json(self, name: str, value: Any) -> None:
        """Write a small file in a folder below, in the place of one that is there; on a local disk
        all of it or nothing.
        """
        content = to_json(value, indent=1).encode()
        if self.local is None:
            self.put(name, io.BytesIO(content))
            return
        path = self.local / name
        with self._errors("writing", name):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_atomically(path, lambda file: file.write(content))
        except RunFolderError as error:
            raise CopyError(str(error)) from error

    def get_json(self, name: str) -> dict[str, Any]:
        """A small file; empty where it is missing, removed at this moment, or torn."""
        content = b""
        with self._errors("reading", name), contextlib.suppress(FileNotFoundError):
            if self.files.get_file_info(name).type == fs.FileType.File:
                with self.files.open_input_stream(name) as source:
                    content = source.read()
        with contextlib.suppress(ValueError):
            value = json.loads(content)
            return value if isinstance(value, dict) else {}
        return {}

    def remove(self, name: str) -> None:
        """Remove a file or a folder; what is gone already is well."""
        with self._errors("removing", name), contextlib.suppress(FileNotFoundError):
            kind = self.files.get_file_info(name).type
            if kind == fs.FileType.Directory:
                self.files.delete_dir(name)
            elif kind == fs.FileType.File:
                self.files.delete_file(name)

    @contextlib.contextmanager
    def _errors(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException, ValueError) as error:
            raise CopyError(
                f"{doing} '{joined(self.text, name)}' failed: {_reason(error)}"
            ) from error


def checked(text: str) -> str:
    """An address as it is written down, the same however it is given: a path is made whole, a slash
    at its end goes. Errors: GraphError for one that holds a password.
    """
    if is_folder(text):
        path = unquote(urlsplit(text).path) if text.startswith("file://") else text
        return str(Path(path).absolute())
    parts = urlsplit(text)
    if parts.password is not None or any(map(_SECRET.search, parse_qs(parts.query))):
        raise GraphError(
            f"'{parts.scheme}://...@{parts.hostname}' holds a password, which would stand in the"
            " run folder; leave it out, and give it as the file system's client reads it (for S3"
            " AWS_SECRET_ACCESS_KEY)"
        )
    return joined(text, "")


def is_folder(text: str) -> bool:
    """Whether an address is a folder that this machine sees."""
    return "://" not in text or text.startswith("file://")


def is_own(text: str) -> bool:
    """Whether an address is a folder of this user's on this machine that not everybody may write
    to.
    """
    path = Path(checked(text))
    if not is_folder(text) or not path.exists():
        return False
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & stat.S_IWOTH


def joined(text: str, name: str) -> str:
    """An address below another one; what follows a question mark is for the file system, and stays
    at the end.
    """
    path, options = _split(text)
    return f"{path.rstrip('/')}/{name}".rstrip("/") + options


def _split(text: str) -> tuple[str, str]:
    """The path, and from the question mark on what is for the file system; a folder's path may have
    one of its own.
    """
    path, mark, options = (text, "", "") if is_folder(text) else text.partition("?")
    return path, mark + options


def _copied(source: Any, out: Any, moved: Moved = lambda count: None) -> dict[str, Any]:
    """Write all that a file has to another one; size and checksum."""
    digest, size = xxhash.xxh3_64(), 0
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        out.write(chunk)
        size += len(chunk)
        moved(len(chunk))
    return {"bytes": size, "xxh3_64": digest.hexdigest()}


def _reason(error: BaseException) -> str:
    """The first line of what a file system says, which may be a page."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).strip().splitlines()[0].rstrip(".")


# Parts of a run


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Where copies of a run's checkpoints go; plain values."""

    address: str
    """As the user gave it; the run has a folder there, of its own folder's name."""
    run: str
    part: int
    token: str
    """Of the claim on that part."""
    trainers: tuple[str, ...]
    """Folders of those that keep checkpoints; empty for a run's only one."""

    @property
    def place(self) -> str:
        """The run's own address, for people: what `dataflow resume --from` takes."""
        return joined(self.address, self.run)

    def at(self, address: Address) -> Address:
        """Its part there."""
        return part_of(address.below(self.run), self.part)

    def check(self, address: Address) -> None:
        """Errors: TakenUp where the run was taken up from its address since; CopyError."""
        run = address.below(self.run)
        for part in parts(run):
            if part > self.part and (claimants := claims(run, part)):
                claim = next(iter(claimants.values()))
                raise TakenUp(
                    f"'{self.run}' was taken up from '{self.place}' by process"
                    f" {claim.get('process')} on host '{claim.get('host')}', as part {part} where"
                    f" this one is part {self.part}; leave it to that one, or start a new run"
                )


def part_of(run: Address, number: int) -> Address:
    """The folder of a part."""
    return run.below(_part_name(number))


def _part_name(number: int) -> str:
    return f"part-{number:06d}"


def parts(run: Address) -> list[int]:
    """Numbers of all parts, ascending. Errors: CopyError."""
    matches = map(_PART.fullmatch, run.names())
    return sorted(int(match[1]) for match in matches if match)


def claims(run: Address, part: int) -> dict[str, Mapping[str, Any]]:
    """By token, who wants a part. Errors: CopyError."""
    folder = part_of(run, part)
    return {token: folder.get_json(f"{_CLAIM}{token}.json") for token in _tokens(folder)}


def claim(
    address: Address, text: str, run: str, trainers: Sequence[str], after: int | None
) -> Copies:
    """Have the next part of a run for this process. after: the last part that is known; None: the
    run is new.

    Of several that claim one at a time none has it, or one: each writes its claim, and then looks
    for others. Errors: GraphError, RunError where it belongs to somebody else; CopyError.
    """
    folder = address.below(run)
    newest = max(parts(folder), default=0)
    if after is None and newest:
        raise GraphError(
            f"'{folder.text}' has checkpoints of a run of this name; give the address as that run"
            " knows it, or another one"
        )
    if after is not None and newest > after:
        raise RunError(
            f"'{folder.text}' was taken up by another process at this moment; leave the run to it"
        )
    part, token = newest + 1, secrets.token_hex(8)
    name = f"{_part_name(part)}/{_CLAIM}{token}.json"
    claimant = {"host": socket.gethostname(), "process": os.getpid(), "trainers": list(trainers)}
    try:
        folder.put_json(name, claimant)
        others = _tokens(part_of(folder, part)) - {token}
    except CopyError:
        with contextlib.suppress(CopyError):
            folder.remove(name)
        raise
    if others:
        folder.remove(name)
        raise RunError(
            f"'{folder.text}' is being taken up by {len(others) + 1} processes at once, so that"
            " none of them has it; try again with one"
        )
    return Copies(address=text, run=run, part=part, token=token, trainers=tuple(trainers))


def _tokens(part: Address) -> set[str]:
    return {
        name.removeprefix(_CLAIM).removesuffix(".json")
        for name in part.names()
        if name.startswith(_CLAIM)
    }


# Copies in a part


@dataclass(frozen=True)
class Store:
    """Copies of one trainer's checkpoints: checkpoints/ of a part, or checkpoints/TRAINER/. Its
    methods raise CopyError.
    """

    address: Address
    """Of the part."""
    trainer: str = ""

    @property
    def place(self) -> Address:
        """The folder there."""
        place = self.address.below("checkpoints")
        return place.below(self.trainer) if self.trainer else place

    def steps(self) -> list[int]:
        """Steps that have a folder there, whole or not, ascending."""
        matches = map(_STEP.fullmatch, self.place.names())
        return sorted(int(match[1]) for match in matches if match)

    def marker(self, step: int) -> dict[str, Any]:
        """What its marker says; empty where there is none, or a torn one: no copy."""
        marker = self.place.get_json(f"{name_of(step)}/{MARKER}")
        return marker if marker.get("step") == step and LEDGER in marker.get("files", {}) else {}

    def whole(self) -> list[int]:
        """Steps that are there whole, as far as markers tell, ascending."""
        return [step for step in self.steps() if self.marker(step)]

    def put(
        self,
        step: int,
        folder: Path,
        snapshot: Callable[[Path], None],
        moved: Moved,
        check: Callable[[], None],
    ) -> None:
        """Copy a committed checkpoint: its files, the ledger as it is now, and then its marker.

        snapshot: writes the ledger. check: raises where nothing may be written any more; asked
        before the marker. Where all that is there but the marker, which says otherwise, that alone
        is written. Errors: RunFolderError where the folder is not what its marker says: then
        nothing is whole that was not before.
        """
        marker, old_marker = local_marker(folder), self.marker(step)
        copied = dict(old_marker.get("files", {}))
        copied.pop(LEDGER, None)
        if not old_marker or copied != dict(marker["files"]):
            if old_marker:
                self.place.remove(f"{name_of(step)}/{MARKER}")
            old_marker = {"files": self._put_files(step, folder, marker["files"], snapshot, moved)}
        new_marker = {**marker, "files": old_marker["files"]}
        if self.marker(step) != new_marker:
            check()
            self.place.put_json(f"{name_of(step)}/{MARKER}", new_marker)

    def _put_files(
        self,
        step: int,
        folder: Path,
        files: Mapping[str, Any],
        snapshot: Callable[[Path], None],
        moved: Moved,
    ) -> dict[str, Any]:
        copied = {}
        for name, facts in files.items():
            with _opened(folder / name) as source:
                copied[name] = self.place.put(f"{name_of(step)}/{name}", source, moved)
            if copied[name] != facts:
                raise RunFolderError(
                    f"'{folder / name}' is not as it was written: {copied[name]} instead of"
                    f" {facts}; look at the disk"
                )
        with tempfile.TemporaryDirectory(prefix="dataflow-ledger-") as aside:
            snapshot(Path(aside) / LEDGER)
            with (Path(aside) / LEDGER).open("rb") as source:
                copied[LEDGER] = self.place.put(f"{name_of(step)}/{LEDGER}", source, moved)
        return copied

    def get(self, step: int, into: Path, moved: Moved = lambda count: None) -> None:
        """Bring a whole checkpoint here, into an empty folder; the ledger lies beside its files.
        Errors: CopyError, also where a file is not as the marker says.
        """
        for name, expected in self.marker(step)["files"].items():
            facts = self.place.get(f"{name_of(step)}/{name}", into / name, moved)
            if facts != expected:
                raise CopyError(
                    f"'{name}' of the checkpoint of step {step} at '{self.place.text}' is damaged:"
                    f" {facts} instead of {expected}"
                )

    def clear(self, before: int) -> None:
        """Remove copies of steps below `before` that are temporary, or were never whole; the marker
        first.
        """
        for step in self.steps():
            if step < before:
                marker = self.marker(step)
                if not marker or marker.get(TEMPORARY) is True:
                    self._remove(step)

    def take_back(self, last: int) -> None:
        """Remove what is of later steps than `last`: those were taken back, and others will have
        their numbers.
        """
        for step in self.steps():
            if step > last:
                self._remove(step)

    def _remove(self, step: int) -> None:
        self.place.remove(f"{name_of(step)}/{MARKER}")
        self.place.remove(name_of(step))


def name_of(step: int) -> str:
    """Of a checkpoint's folder."""
    return f"step-{step:06d}"


def local_marker(folder: Path) -> dict[str, Any]:
    """That of a checkpoint here. Errors: RunFolderError where there is none."""
    try:
        marker: dict[str, Any] = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"'{folder}' is no committed checkpoint: {error}; it may be gone by now"
        ) from error
    return marker


def _opened(path: Path) -> IO[bytes]:
    """Errors: RunFolderError."""
    try:
        return path.open("rb")
    except OSError as error:
        raise RunFolderError(
            f"'{path}' cannot be copied: {error.strerror}; it may be gone by now"
        ) from error


# What a run could go on from


@dataclass(frozen=True, kw_only=True)
class FoundCopy:
    """What a run can go on from."""

    place: str
    """Address of the folder that holds it."""
    run: str
    part: int
    newest: int
    """Part: of all that were claimed."""
    steps: Mapping[str, Sequence[int]]
    """By folder of a trainer, its copies that are whole, as far as markers tell, ascending."""

    def store(self, trainer: str) -> Store:
        """That of a trainer."""
        return Store(part_of(Address.of(self.place).below(self.run), self.part), trainer)


def choose(whole: Mapping[int, Mapping[str, Sequence[int]]]) -> int:
    """The part to go on from: the newest from which every trainer can, else the newest with any
    copy; 0: there is none.

    whole: by part, by trainer, the steps that are there.
    """
    for is_enough in (all, any):
        for part in sorted(whole, reverse=True):
            if whole[part] and is_enough(map(bool, whole[part].values())):
                return part
    return 0


def find(text: str) -> FoundCopy:
    """text: address of a run, or of a place with one run. Errors: GraphError; RunError where there
    is no whole copy, or several runs are; CopyError.
    """
    place, name = _run_at(Address.of(text))
    run = place.below(name)
    whole: dict[int, dict[str, list[int]]] = {}
    for part in parts(run):
        trainers = [
            trainer
            for claimant in claims(run, part).values()
            for trainer in claimant.get("trainers", [])
        ]
        whole[part] = {trainer: Store(part_of(run, part), trainer).whole() for trainer in trainers}
    chosen, newest = choose(whole), max(whole, default=0)
    if not chosen:
        raise RunError(
            f"there is no whole checkpoint at '{run.text}', but {newest or 'no'} parts; give the"
            " address that the run printed, or start a new run"
        )
    return FoundCopy(place=place.text, run=name, part=chosen, newest=newest, steps=whole[chosen])


def _run_at(address: Address) -> tuple[Address, str]:
    """The place that holds runs, and the name of the one that is meant."""
    if parts(address):
        return address.parent, address.name
    runs = [name for name in address.names() if parts(address.below(name))]
    if len(runs) > 1:
        raise RunError(
            f"'{address.text}' holds {len(runs)} runs: {', '.join(runs[-8:])}; give the address of"
            f" one, as in {address.below(runs[-1]).text}"
        )
    if not runs:
        raise RunError(
            f"there is no whole checkpoint at '{address.text}', but no parts; give the address that"
            " the run printed, or start a new run"
        )
    return address, runs[0]
