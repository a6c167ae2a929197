"""How a run was started, so that it can be started again: the program, its arguments, its working
directory.
"""

import contextlib
import dataclasses
import grp
import importlib.machinery
import importlib.util
import json
import os
import pwd
import runpy
import shlex
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from dataflow.errors import GraphError, RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.system.files import plain

KEY = "launch"
"""The key in config.json."""
TRUSTED = "DATAFLOW_TRUSTED"
"""The name in the environment: the run folder whose program was started, after its owners were
checked."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """`python -m module arguments`, or `python file arguments`, in a folder."""

    module: str = ""
    file: str = ""
    """The file, where there is no module."""
    arguments: tuple[str, ...] = ()
    folder: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """The values of `build`'s flags."""
    config: str = ""
    """The text of a file that gives all flags again; it lies in the run's folder, see
    `RunFolder.flags`."""

    @property
    def name(self) -> str:
        """Its module, or its file."""
        return self.module or self.file

    @property
    def program(self) -> str:
        """The program as text."""
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
        """The command line with which it is started again. Errors: RunError when the program is not
        there any more.
        """
        if missing := self._missing():
            raise RunError(
                f"the run was started {missing}; put it back as it was, PYTHONPATH too, or call "
                "run(graph, resume=...) in a script"
            )
        how = ["-m", self.module] if self.module else [self.file]
        return [sys.executable, *how, *self.arguments, *more]

    def run_here(self) -> None:
        """Run it in this process, as `command` would in one of its own. Errors: RunError when it is
        not there; what the program raises, SystemExit among it.
        """
        if missing := self._missing():
            raise RunError(
                f"the program was started {missing}; have it at the same place on every host"
            )
        os.chdir(self.folder)
        sys.argv = [self.file or self.module, *self.arguments]
        sys.path.insert(0, self.folder if self.module else str(Path(self.file).parent))
        if self.module:
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.file, run_name="__main__")

    def _missing(self) -> str:
        """The missing part of it; empty: none."""
        if not Path(self.folder).is_dir():
            return f"in '{self.folder}', which is not there any more"
        if self.file and not Path(self.file).is_file():
            return f"by '{self.file}', which is not there any more"
        if self.module and not _found(self.module, self.folder):
            return f"by module '{self.module}', which is not found from '{self.folder}'"
        return ""


def this_launch() -> Launch | None:
    """The program that runs now; None for one that has no file, as in a notebook."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    file = Path(sys.argv[0]).absolute() if sys.argv and sys.argv[0] else None
    if spec is not None and spec.name:
        how: dict[str, Any] = {"module": str(spec.name)}
    elif file is not None and file.is_file():
        how = {"file": str(file)}
    else:
        return None
    return Launch(**how, arguments=tuple(sys.argv[1:]), folder=str(Path.cwd()))


def check_text(*more: tuple[str, str]) -> None:
    """Refuse a program, its arguments, its folder, and `more`, what it is and how it goes, which no
    file of a run could hold: they are UTF-8, and on Linux a name may be any bytes. Errors:
    GraphError.
    """
    texts = (
        ("the folder it starts in", str(Path.cwd())),
        *(("an argument of the program", argument) for argument in sys.argv),
    )
    for name, text in (*texts, *more):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            near = text[max(0, error.start - 40) : error.end + 40]
            raise GraphError(
                f"{name} is no text that UTF-8 knows, in which a run's files are written: {near!a};"
                " rename it"
            ) from None


def recorded_launch(folder: RunFolder) -> Launch | None:
    """How the run in a folder was started; None where it was by a script that calls `run`."""
    from dataflow.history.describe import described

    recorded = described(folder)[1].get(KEY)
    return None if recorded is None else msgspec.convert(recorded, Launch)


def start_again(
    folder: RunFolder,
    *more: str,
    trust: bool = False,
    origin: str = "",
    doubts: Sequence[str] | None = None,
) -> NoReturn:
    """Become the program that started the run in a folder, with more arguments: this process is
    replaced.

    trust: whether it may be one that another user's folder names; else somebody at a terminal is
    asked. origin: the address that the folder was made from, where others may write. doubts: what
    `doubts_of` found before anybody read the folder's ledger; None: nobody has.
    Errors: RunError when it is not there any more, nothing says which it was, or it may not be run.
    """
    doubts = doubts_of(folder) if doubts is None else doubts
    launch = recorded_launch(folder)
    if launch is None:
        raise RunError(
            f"'{folder.path.name}' was started by a script that calls run(...), not main(build), so"
            f" nothing says how its graph is made; call run(graph, resume='{folder.path}') in that"
            " script"
        )
    command = launch.command(*more)
    if origin and not doubts:
        doubts = [f"belongs to whoever may write at '{origin}'"]
    check_owner(folder, launch, trust, doubts)
    os.environ[TRUSTED] = str(folder.path)
    os.chdir(launch.folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def check_owner(
    folder: RunFolder,
    launch: Launch,
    trust: bool,
    doubts: Sequence[str],
    ask: Callable[[str], bool] | None = None,
) -> None:
    """Have the program that a folder names which others could have written run only if this user
    wants it: it would run with his rights.

    doubts: how they could. ask: puts a question to somebody; None: at the terminal, if there is
    one. Errors: RunError when nobody says yes.
    """
    if trust or not doubts:
        return
    why = f"'{folder.path}' {', and '.join(doubts)}"
    command = f"{launch.program} {shlex.join(launch.arguments)}".strip()
    if ask is None:
        ask = _ask if sys.stdin.isatty() and sys.stderr.isatty() else lambda question: False
    if not ask(f"{why}, and names a program to run as {_user(os.getuid())}: {command}"):
        raise RunError(
            f"{why}, and what it names would run with your rights: {command} in '{launch.folder}';"
            " look at it, then say yes at a terminal, or give --trust"
        )


def trusted(folder: RunFolder) -> RunFolder:
    """The same for a program that goes on with a run: the folder names what it runs beside,
    operators that were swapped in and trackers. Errors: RunError unless `start_again` has looked
    already.
    """
    if (doubts := doubts_of(folder)) and os.environ.get(TRUSTED) != str(folder.path):
        raise RunError(
            f"'{folder.path}' {', and '.join(doubts)}, and what it names would run with your"
            " rights; look at it, then go on with dataflow resume --trust, or have it belong to"
            " you alone (chown, chmod go-w)"
        )
    return folder


def doubts_of(folder: RunFolder) -> list[str]:
    """Why others than this user could have written what a run folder has run: `belongs to user
    'a'`. To be asked before the ledger is opened: where root does that, SQLite gives him the log
    that another has put there.
    """
    doubts: dict[str, None] = {}
    for path in (
        folder.path,
        *sorted(folder.path.glob("ledger.db*")),
        folder.config,
        folder.graph_json,
    ):
        subject = "" if path == folder.path else f"has a {path.name} that "
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if status.st_uid != os.getuid():
                doubts[f"{subject}belongs to {_user(status.st_uid)}"] = None
            if status.st_mode & stat.S_IWOTH or (
                status.st_mode & stat.S_IWGRP and _has_others(status)
            ):
                doubts[
                    f"{subject}may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
                ] = None
    return list(doubts)


def _has_others(status: os.stat_result) -> bool:
    """Whether others than its owner are in the group of a file: not in one of his own name, which
    many systems give to each user, and not in one without a name.
    """
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(status.st_gid)
        owner = pwd.getpwuid(status.st_uid).pw_name
        return group.gr_name != owner or not {owner}.issuperset(group.gr_mem)
    return False


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
        f"--{name.replace('_', '-')} was {recorded.flags.get(name)!r} and is {plain_flag(value)!r}"
        for name, value in now.items()
        if name in recorded.flags and recorded.flags[name] != plain_flag(value)
    ]
    if changed:
        raise GraphError(
            f"a run goes on with the flags that it began with, but {'; '.join(changed)}; leave them"
            " as they were (`dataflow resume` does), or start a new run"
        )


def plain_flag(value: Any) -> Any:
    try:
        return plain(value)
    except TypeError:
        return repr(value)


def _found(module: str, folder: str) -> bool:
    """Whether `python -m module` would find it from a folder; asks for the file of its first
    package alone.
    """
    package = module.split(".")[0]
    # an installation that is edited has a finder of its own
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(package) is not None:
            return True
    return importlib.machinery.PathFinder.find_spec(package, [folder, *sys.path]) is not None


REPLAY = "--replay"
"""The flag of every program that calls `main(build)`, with which `dataflow replay` starts it."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a user wants replayed; plain values."""

    run: str
    first: int = 0
    """Step behind the weights to start from; the newest good checkpoint at or before it is
    taken."""
    last: int | None = None
    """Last step to train; None: the last that the run made."""
    loss: str = ""
    """Another loss; empty: the run's own."""
    trainer: str = ""
    """The trainer, where the graph has several."""
    device: str = "cpu"
    tolerance: float = 0.0
    """The largest accepted difference of a loss; 0: none."""
    out: str = ""
    """Folder for a checkpoint of the result; empty: it is forgotten."""
    json: bool = False
    """Print JSON."""

    def as_arguments(self) -> list[str]:
        """Arguments for a program that calls `main(build)`."""
        return [REPLAY, json.dumps(dataclasses.asdict(self))]

    @classmethod
    def split_off(cls, arguments: Sequence[str]) -> "tuple[list[str], Wishes | None]":
        """The arguments without those of a replay, and what it is to be; None when it is none."""
        words = list(arguments)
        if words[-2:-1] != [REPLAY]:
            return words, None
        return words[:-2], cls(**json.loads(words[-1]))
