"""A file system that fails when it is told to, for copies of checkpoints; the rest of it is a
folder.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyarrow import fs

from dataflow.folder.copies.store import Address


@dataclass
class Weather:
    """What goes wrong, from now on."""

    down: bool = False
    """Every write fails."""
    after_bytes: int | None = None
    """Writes fail once so many bytes were taken, each part of which is there."""
    wrote: list[str] = field(default_factory=list)
    """Names, in order."""
    before: Callable[[str], object] = lambda name: None
    """Called before a file is written."""
    before_read: Callable[[str], object] = lambda name: None
    """Called before a file, that was seen to be there, is opened to be read."""
    before_list: Callable[[], object] = lambda: None
    """Called before a folder is listed."""


class _Failing(fs.FileSystemHandler):  # type: ignore[misc]
    def __init__(self, folder: Path, weather: Weather) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.inner, self.weather = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem()), weather

    def __eq__(self, other: object) -> bool:
        return self is other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _check(self, taken: int = 0) -> None:
        weather = self.weather
        if weather.down:
            raise OSError("the network is down")
        if weather.after_bytes is not None:
            weather.after_bytes -= taken
            if weather.after_bytes < 0:
                raise OSError("the connection was reset")

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self.weather.before(path)
        self._check()
        self.weather.wrote.append(path)
        stream = self.inner.open_output_stream(path)
        check = self._check

        class Written:
            closed = False

            def write(self, data: bytes) -> int:
                check(len(data))
                stream.write(data)
                return len(data)

            def flush(self) -> None:
                stream.flush()

            def close(self) -> None:
                stream.close()

        import pyarrow as pa

        return pa.PythonFile(Written(), "w")

    def get_type_name(self) -> str:
        return "failing"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> Any:
        return self.inner.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        self.weather.before_list()
        return self.inner.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._check()
        self.inner.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._check()
        self.inner.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool) -> None:
        self.inner.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._check()
        self.inner.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        raise NotImplementedError

    def copy_file(self, src: str, dest: str) -> None:
        raise NotImplementedError

    def open_input_stream(self, path: str) -> Any:
        self.weather.before_read(path)
        return self.inner.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        return self.inner.open_input_file(path)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError


def failing(folder: Path, weather: Weather) -> Address:
    """An address that is a folder of this machine, and does not know it."""
    return Address(f"test://{folder.name}", fs.PyFileSystem(_Failing(folder, weather)))
