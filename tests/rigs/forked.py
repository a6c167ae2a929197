"""Python programs that are forked in the place of interpreters that start: torch takes seconds to
import, a fork none.

A process of its own, forked when all tests are collected and before the first runs, has what they
import and has computed nothing. From it a program is forked, which gets what `subprocess.Popen`
gives it (arguments, environment, folder, files, group) and becomes a child of the test's process,
as any other.
"""

import _posixsubprocess
import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import importlib
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import msgpack
import pytest

from dataflow.system.child import die_with_parent, let_go_of_files
from dataflow.system.forking import fork, has_used_cuda

_PR_SET_CHILD_SUBREAPER = 36
_BYTES = 1 << 17
_FILES = 64
_HIGH = 512
"""No number of a file to keep is as high."""
_ADOPTED_S = 10.0
_HEEDED = ("-P", "-B")
"""Options: the path stays without the program's folder (it is there already), and no compiled file
is written."""
_INTERRUPTED = 128 + signal.SIGINT
_start = _posixsubprocess.fork_exec
_source: socket.socket | None = None
"""Where programs are asked for."""


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Python programs that this module's tests start are forked, those of `subprocess` and of
    `multiprocessing`.
    """
    with pytest.MonkeyPatch.context() as patch:
        _start_by(patch, _fork_exec)
        yield


@pytest.fixture
def fresh(forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this test's programs are not: its law is what an interpreter does that starts."""
    _start_by(monkeypatch, _start)


def _start_by(patch: pytest.MonkeyPatch, function: Callable[..., int]) -> None:
    patch.setattr(subprocess, "_fork_exec", function)
    patch.setattr(_posixsubprocess, "fork_exec", function)


def prepare() -> None:
    """Fork what programs are forked from; nothing where a child cannot be handed to another
    process.
    """
    global _source
    if sys.platform != "linux" or has_used_cuda():
        return
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _source, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if fork() == 0:
        _serve(theirs)
    theirs.close()


def finish() -> None:
    """End what programs are forked from."""
    global _source
    if _source is not None:
        _source.close()
        _source = None


def _is_program(command: Sequence[str]) -> bool:
    """Whether it is this interpreter with a program, and no option that a fork cannot heed."""
    how = next((word for word in command[1:] if word not in _HEEDED), "-")
    return command[0] == sys.executable and (how in ("-c", "-m") or not how.startswith("-"))


def _fork_exec(
    arguments: Sequence[bytes | str],
    files: object,
    close: bool,
    keep: Sequence[int],
    folder: str | None,
    environment: Sequence[bytes] | None,
    stdin: int,
    stdin_end: int,
    stdout_end: int,
    stdout: int,
    stderr_end: int,
    stderr: int,
    failure_end: int,
    failure: int,
    signals: bool,
    session: bool,
    group: int,
    *others: object,
) -> int:
    """As `_posixsubprocess.fork_exec`: a failure to start is told through `failure`, which is
    closed in the program.
    """
    command = [os.fsdecode(word) for word in arguments]
    if _source is None or not _is_program(command):
        return int(
            _start(
                arguments,
                files,
                close,
                keep,
                folder,
                environment,
                stdin,
                stdin_end,
                stdout_end,
                stdout,
                stderr_end,
                stderr,
                failure_end,
                failure,
                signals,
                session,
                group,
                *others,
            )
        )
    pairs = (
        [pair.split(b"=", 1) for pair in environment]
        if environment is not None
        else list(os.environb.items())
    )
    kept = [number for number in keep if number != failure]
    standard = [given if given >= 0 else at for at, given in enumerate((stdin, stdout, stderr))]
    asked = {
        "command": command,
        "environment": pairs,
        "folder": os.fspath(folder or Path.cwd()),
        "kept": kept,
        "session": session,
        "group": group,
    }
    socket.send_fds(_source, [msgpack.packb(asked)], [failure, *standard, *kept])
    return int(msgpack.unpackb(_source.recv(_BYTES)))


def _serve(asked: socket.socket) -> NoReturn:
    """Fork a program for each request, by way of a process that ends at once: then it is a child of
    the tests'.
    """
    status = 1
    try:
        die_with_parent()
        let_go_of_files((asked.fileno(),))
        _forget_the_parent()
        tests = os.getppid()
        while request := socket.recv_fds(asked, _BYTES, _FILES):
            data, files, *_ = request
            if not data:
                break
            between = fork()
            if between == 0:
                _hand_over(asked, msgpack.unpackb(data), files, tests)
            os.waitpid(between, 0)
            for file in files:
                os.close(file)
        status = 0
    finally:
        os._exit(status)


def _hand_over(
    asked: socket.socket, request: Mapping[str, Any], files: Sequence[int], tests: int
) -> NoReturn:
    pid = fork()
    if pid:
        asked.send(msgpack.packb(pid))
        os._exit(0)
    asked.close()
    failure, *given = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH) for file in files]
    for file in files:
        os.close(file)
    try:
        _set_up(request, given, tests)
    except BaseException as error:
        os.write(failure, f"SubprocessError:0:{error!r}".encode())
        os._exit(1)
    os.close(failure)
    try:
        os._exit(_run(request["command"]))
    finally:
        os._exit(1)


def _set_up(request: Mapping[str, Any], files: Sequence[int], tests: int) -> None:
    """The environment, folder, files and group of the program, once it is a child of the tests'
    process.
    """
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() != tests:
        assert time.monotonic() < deadline, f"process {tests} did not become the parent"
        time.sleep(0.0005)
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    os.environb.clear()
    os.environb.update(request["environment"])
    os.chdir(request["folder"])
    for file, number in zip(files, (0, 1, 2, *request["kept"]), strict=True):
        os.dup2(file, number)
        os.close(file)
    flow = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(
        2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty(), write_through=flow)
    for each in logging._handlerList:  # type: ignore[attr-defined]
        if type(handler := each()) is logging.StreamHandler:
            handler.stream = sys.stderr


def _forget_the_parent() -> None:
    """Signals, hooks, warnings and what is to happen at the end are those of an interpreter that
    starts.
    """
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    atexit._clear()
    importlib.reload(warnings)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.root.handlers.clear()


def _run(command: Sequence[str]) -> int:
    """The exit status, once its threads and what it left to the end of the process have ended."""
    status = 0
    try:
        _be_main(*command)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if status == _INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status & 0xFF


def _be_main(python: str, how: str, *given: str) -> None:
    """As `python how given`."""
    sys.orig_argv, words = [python, how, *given], list(given)
    while how in _HEEDED:
        how = words.pop(0)
    wanted = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if how == "-c":
        sys.argv, sys.path[:0] = ["-c", *words[1:]], ["", *wanted]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), vars(main))
    elif how == "-m":
        sys.argv, sys.path[:0] = ["-m", *words[1:]], [str(Path.cwd()), *wanted]
        sys.modules.pop(words[0], None)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = [how, *words], [str(Path(how).absolute().parent), *wanted]
        runpy.run_path(how, run_name="__main__")
