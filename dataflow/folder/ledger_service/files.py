"""What the ledger's service does with files of the run folder, for workers on any host."""

import tempfile
from pathlib import Path
from typing import IO

from dataflow.folder import placing
from dataflow.folder.ledger import Ledger, LedgerError
from dataflow.folder.ledger.copying import pack
from dataflow.folder.ledger.methods import served
from dataflow.system.files import RunFolderError, append_line, disk

PACKED_BYTES = 4 << 20
"""Bytes of one answer, at most."""


class RunFiles:
    """Requests that change no row of the ledger but places; all may be done twice. Paths are those
    in the run folder.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._folder = ledger, ledger.path.parent
        self._packed: dict[str, tuple[int, IO[bytes]]] = {}
        """By worker, a copy of the ledger that it fetches, and its number."""
        self._has_places = bool(ledger.places())
        """Whether some file of the run was made on a host with a folder of its own."""

    @served("flush", waits_for_disk=True)
    def flush(self) -> None:
        """As `BaseLedger.flush`."""
        self._ledger.flush()

    @served("look at the log")
    def wal_bytes(self) -> int:
        """As `BaseLedger.wal_bytes`."""
        return self._ledger.wal_bytes

    @served("put '{at}' in place")
    def put_in_place(self, path: str, at: str, aside: str | None, host: str) -> None:
        """Rename what a worker wrote, as `placing.put`. host: whose folder that is, where it has
        one of its own: then it is noted only, that its file counts from now on, and the worker
        renames.
        """
        source, target = self._inside(path), self._inside(at)
        old = None if aside is None else self._inside(aside)
        if not host:
            placing.put(source, target, old)
        if host or self._has_places:
            self._ledger.set_place(at, host)
            self._has_places = True

    @served("add to '{path}'")
    def append_line(self, path: str, line: str) -> None:
        """Append a line to a file that several hosts have something to say in; twice is as good as
        once.
        """
        append_line(self._inside(path), line)

    @served("copy the ledger", waits_for_disk=True)
    def pack(self, worker: str, copy: int) -> int:
        """Keep a copy of the ledger as it is now, packed, in the place of the last one for this
        worker; its size. Of a number it is made once, since its bytes are fetched in parts.
        """
        number, file = self._packed.get(worker, (0, None))
        with disk("packing", self._ledger.path):
            if file is None or number != copy:
                if file is not None:
                    file.close()
                file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
                pack(self._ledger.path, file)
                self._packed[worker] = copy, file
            return file.seek(0, 2)

    @served("copy the ledger", waits_for_disk=True)
    def read_packed(self, worker: str, offset: int) -> bytes:
        """Some bytes of that copy."""
        if worker not in self._packed:
            raise LedgerError(
                f"'{worker}' asked for a copy of the ledger that is not there: the service was"
                " started again meanwhile; ask for a new one"
            )
        file = self._packed[worker][1]
        with disk("reading", self._ledger.path):
            file.seek(offset)
            return file.read(PACKED_BYTES)

    @served("read metrics.jsonl", waits_for_disk=True)
    def read_metrics(self, offset: int) -> bytes:
        """Some bytes of metrics.jsonl; none at its end, or where it is not there."""
        path = self._folder / "metrics.jsonl"
        with disk("reading", path):
            if not path.exists():
                return b""
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(PACKED_BYTES)

    def close(self) -> None:
        """Drop copies that nobody has fetched."""
        for _, file in self._packed.values():
            file.close()

    def _inside(self, name: str) -> Path:
        """A path in the run folder. Errors: RunFolderError for one that leads out of it."""
        path = Path(name)
        if path.is_absolute() or ".." in path.parts:
            raise RunFolderError(f"'{name}' is not in the run folder; give a path below it")
        return self._folder / path
