"""How a run was started, so that it can be started again: the program, its arguments, its working directory."""

import contextlib
import importlib.machinery
import importlib.util
import os
import pwd
import runpy
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dataflow.errors import GraphError, RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described
from dataflow.system.files import plain

KEY = "launch"
"""In config.json."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """`python -m module arguments`, or `python file arguments`, in a folder."""

    module: str = ""
    file: str = ""
    """Where there is no module."""
    arguments: tuple[str, ...] = ()
    folder: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """The keyword arguments of `build` that the arguments came to."""

    @property
    def program(self) -> str:
        """For people."""
        return f"python -m {self.module}" if self.module else f"python {self.file}"

    @property
    def main_file(self) -> Path | None:
        """The file of its code; None where it is not found."""
        if self.file:
            return Path(self.file).resolve()
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(self.module)
            if spec is not None and spec.origin and spec.has_location:
                return Path(spec.origin).resolve()
        return None

    def command(self, *more: str) -> list[str]:
        """The command line with which it is started again. Errors: RunError when the program is not there any more."""
        if missing := self._missing():
            raise RunError(
                f"the run was started {missing}; put it back as it was, PYTHONPATH too, or call "
                f"run(graph, resume=...) in a script"
            )
        how = ["-m", self.module] if self.module else [self.file]
        return [sys.executable, *how, *self.arguments, *more]

    def run_here(self) -> None:
        """Run it in this process, as `command` would in one of its own. Errors: RunError when it is not there; what the
        program raises, SystemExit among it."""
        if missing := self._missing():
            raise RunError(f"the program was started {missing}; have it at the same place on every host")
        os.chdir(self.folder)
        sys.argv = [self.file or self.module, *self.arguments]
        sys.path.insert(0, self.folder if self.module else str(Path(self.file).parent))
        if self.module:
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.file, run_name="__main__")

    @classmethod
    def from_plain(cls, found: Mapping[str, Any]) -> "Launch":
        """What JSON or msgpack has made of one."""
        return cls(**{**found, "arguments": tuple(found["arguments"])})

    def _missing(self) -> str:
        """Which part of it is not there; empty: none."""
        if not Path(self.folder).is_dir():
            return f"in '{self.folder}', which is not there any more"
        if self.file and not Path(self.file).is_file():
            return f"by '{self.file}', which is not there any more"
        if self.module and not _found(self.module, self.folder):
            return f"by module '{self.module}', which is not found from '{self.folder}'"
        return ""


def this_launch(flags: Mapping[str, Any]) -> Launch | None:
    """The program that runs now; None for one that has no file, as in a notebook."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    file = Path(sys.argv[0]).absolute() if sys.argv and sys.argv[0] else None
    if spec is not None and spec.name:
        how = {"module": str(spec.name)}
    elif file is not None and file.is_file():
        how = {"file": str(file)}
    else:
        return None
    known = {name: _plain(value) for name, value in flags.items()}
    return Launch(**how, arguments=tuple(sys.argv[1:]), folder=str(Path.cwd()), flags=known)


def recorded_launch(folder: RunFolder) -> Launch | None:
    """How the run in a folder was started; None where it was by a script that calls `run`."""
    found = described(folder)[1].get(KEY)
    return None if found is None else Launch.from_plain(found)


def start_again(folder: RunFolder, *more: str, trust: bool = False, origin: str = "") -> NoReturn:
    """Become the program that started the run in a folder, with more arguments: this process is replaced.

    trust: whether it may be one that another user's folder names; else somebody at a terminal is asked. origin: the
    address that the folder was made from, where others may write.
    Errors: RunError when it is not there any more, nothing says which it was, or it may not be run.
    """
    launch = recorded_launch(folder)
    if launch is None:
        raise RunError(
            f"'{folder.path.name}' was started by a script that calls run(...), not main(build), so nothing says how "
            f"its graph is made; call run(graph, resume='{folder.path}') in that script"
        )
    command = launch.command(*more)
    check_owner(folder, launch, trust, origin=origin)
    os.chdir(launch.folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def check_owner(
    folder: RunFolder, launch: Launch, trust: bool, ask: Callable[[str], bool] | None = None, origin: str = ""
) -> None:
    """Have the program that another user's folder names run only if this user wants it: it would run with his rights.
    So with a folder that was made from an address, `origin`.

    ask: puts a question to somebody; None: at the terminal, if there is one. Errors: RunError when nobody says yes.
    """
    strangers = {path.stat().st_uid for path in (folder.path, folder.path / "config.json")} - {os.getuid()}
    if trust or not (strangers or origin):
        return
    owners = " and ".join(map(_user, sorted(strangers))) if strangers else f"whoever may write at '{origin}'"
    wanted = f"{launch.program} {shlex.join(launch.arguments)}".strip()
    if ask is None:
        ask = _ask if sys.stdin.isatty() and sys.stderr.isatty() else lambda question: False
    if not ask(f"'{folder.path}' belongs to {owners}, and names a program to run as {_user(os.getuid())}: {wanted}"):
        raise RunError(
            f"'{folder.path.name}' belongs to {owners}, and what it names would run with your rights: {wanted} in "
            f"'{launch.folder}'; look at it, then say yes at a terminal, or give --trust"
        )


def _ask(question: str) -> bool:
    print(f"{question}\nRun it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _user(number: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user '{pwd.getpwuid(number).pw_name}'"
    return f"user {number}"


def check_flags(recorded: Launch, now: Mapping[str, Any]) -> None:
    """Refuse flags that are not those of the run. Errors: GraphError, which names them."""
    changed = [
        f"--{name.replace('_', '-')} was {recorded.flags.get(name)!r} and is {_plain(value)!r}"
        for name, value in now.items() if name in recorded.flags and recorded.flags[name] != _plain(value)
    ]  # fmt: skip
    if changed:
        raise GraphError(
            f"a run goes on with the flags that it began with, but {'; '.join(changed)}; leave them as they were "
            f"(`dataflow resume` does), or start a new run"
        )


def _plain(value: Any) -> Any:
    try:
        return plain(value)
    except TypeError:
        return repr(value)


def _found(module: str, folder: str) -> bool:
    """Whether `python -m module` would find it from a folder; asks for the file of its first package alone."""
    package = module.split(".")[0]
    with contextlib.suppress(ImportError, ValueError):  # an installation that is edited has a finder of its own
        if importlib.util.find_spec(package) is not None:
            return True
    return importlib.machinery.PathFinder.find_spec(package, [folder, *sys.path]) is not None
