"""What is asked of whoever has files of a run, and the answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from dataflow.system.messages import Codec, Natural


@dataclass(frozen=True)
class ListFiles:
    """All files below a folder of the run folder, or the one that stands there."""

    path: str


@dataclass(frozen=True)
class ReadFile:
    """Some bytes of one."""

    path: str
    offset: Natural


@dataclass(frozen=True)
class Question:
    """With a ticket, as it may be asked again."""

    ticket: Natural
    what: ListFiles | ReadFile


@dataclass(frozen=True)
class Listed:
    """Bytes of each, by its path in the run folder."""

    files: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class FileChunk:
    """What stands there from the offset on."""

    data: bytes
    size: Natural
    """Of the whole file."""
    stamp: str
    """Another one where the file was changed."""
    checksum: str
    """xxh3_64 of the data."""


@dataclass(frozen=True)
class CannotRead:
    """Why there is nothing to be had."""

    why: str


@dataclass(frozen=True)
class Answered:
    """To the question with this ticket."""

    ticket: Natural
    what: Listed | FileChunk | CannotRead


Answer: TypeAlias = Listed | FileChunk | CannotRead
TO_FILES: Codec[Question] = Codec("dataflow.to-files", 1, Question)
FROM_FILES: Codec[Answered] = Codec("dataflow.from-files", 1, Answered)
