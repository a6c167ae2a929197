"""The engine whose forward passes vLLM makes: rollouts out to its process, tokens back, weights in
between.

Log-probabilities are those that vLLM's sampler drew from (`processed_logprobs`): after repetition
penalty, temperature, min_p, top_k and top_p, in that order, renormalised, float32 of logits in the
model's type. Largest difference from transformers' forward pass, measured over 640 tokens: in
float32 7e-7 for weights of standard deviation 0.02 and 2e-5 for 0.2; in bfloat16, where vLLM's
kernels round elsewhere, 5e-3 and 0.3. At temperature 0 they are 0. Equal seeds draw equal tokens
unless a batch of another composition rounds a logit across a mark.
"""

from __future__ import annotations

import dataclasses
import json
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

from dataflow.errors import WorkerDied
from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.limits import Limits
from dataflow.model import Model
from dataflow.model_files import INDEX, folder_here
from dataflow.records import AnyArray
from dataflow.runtime import Context
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.engine.budget import host_budget
from operators.engine.build import BuiltEngine, context_tokens_of, sampling_of
from operators.engine.interface import (
    ABORTED,
    BROKEN,
    STOPPED,
    TOO_LONG,
    EndedRollout,
    PromptStart,
    Row,
)
from operators.engine.sampler import Sampling
from operators.engine.stop_strings import StopStrings, stops_of
from operators.engine.vllm.process import (
    INSTALL,
    SERVER,
    ServerProcess,
    environment_of,
    interpreter,
)
from operators.engine.vllm.shared_tensors import attach, lay_out, pack_handle, reserve
from operators.generator import GeneratorKnobs
from operators.models.borders import changing_rope
from operators.models.folders import ModelError
from operators.models.loading import load_configs, load_model, load_tokenizer


@dataclass
class Live:
    """A rollout that vLLM decodes."""

    start: PromptStart
    ticket: int
    age: int
    seed: int
    sampling: Sampling
    stop: StopStrings | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def row(self) -> Row:
        """Prompt and completion so far."""
        before = len(self.start.prompt)
        drawn = RolloutTokens.drawn(
            np.array(self.tokens), np.array(self.logprobs), np.array(self.versions)
        )
        return Row(
            ticket=self.ticket,
            age=self.age,
            tokens=RolloutTokens.joined([RolloutTokens.given(self.start.prompt), drawn]),
            start=before,
            limit=self.start.limit,
            seed=self.seed,
            sampling=self.sampling,
            stop=self.stop,
        )


class VllmWeights:
    """Full tensors under the trainer's names: in memory that both processes map, or on a GPU that
    both see.
    """

    def __init__(self, module: torch.nn.Module, dtype: str, device: str) -> None:
        """Hold a copy of the module's parameters."""
        parameters = dict(module.named_parameters())
        self._file: int | None = None
        if device == "cpu":
            layout, size = lay_out(
                {name: tuple(tensor.shape) for name, tensor in parameters.items()}, dtype
            )
            self._file = reserve(size)
            self._close = weakref.finalize(self, os.close, self._file)
            self._opening: dict[str, Any] = {"file": self._file, "layout": layout}
            self.tensors = attach(self._file, layout)
        else:
            kind = getattr(torch, dtype)
            self.tensors = {
                name: torch.empty_like(p, dtype=kind, device=device)
                for name, p in parameters.items()
            }
            self._opening = {}
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(parameters[name])

    @property
    def files(self) -> list[int]:
        """Open files that vLLM's process must inherit."""
        return [] if self._file is None else [self._file]

    def opening(self) -> dict[str, Any]:
        """The first message to vLLM's process."""
        return self._opening

    def offer(self) -> dict[str, Any]:
        """The message to vLLM's process at an update: handles, or nothing where it maps the
        memory.
        """
        if self._file is not None:
            return {}
        torch.cuda.synchronize()
        names = list(self.tensors)
        gpu = str(torch.cuda.get_device_properties(self.tensors[names[0]].device).uuid)
        return {
            "names": names,
            "dtype_names": [
                str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors.values()
            ],
            "shapes": [list(tensor.shape) for tensor in self.tensors.values()],
            "handles": [{gpu: pack_handle(_handle(tensor))} for tensor in self.tensors.values()],
        }

    def close(self) -> None:
        """Close the file; the memory is freed once no process maps it."""
        self.tensors = {}
        if self._file is not None:
            self._close()


def _handle(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What another process opens a CUDA tensor with."""
    return reduce_tensor(tensor)[1]  # type: ignore[no-untyped-call,no-any-return]


def check_names(model: Model, names: Collection[str], folder: Path) -> None:
    """Refuse a model whose trained names are not those of its files: vLLM loads by the files'
    names.

    Raises ModelError, for example for a mixture of experts whose experts the trainer holds in one
    tensor.
    """
    stored = _stored(folder)
    unknown = sorted(set(names) - stored)
    if unknown:
        raise ModelError(
            f"engine 'vllm' cannot take the weights of model '{model.name}': {len(unknown)} of its"
            f" {len(names)} "
            f"parameters are not in its files by their names, such as {unknown[:3]}; use"
            ' engine="native"'
        )


def _stored(folder: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors files."""
    if (folder / INDEX).is_file():
        return set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"])
    tensor_names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            tensor_names.update(json.loads(opened.read(int.from_bytes(opened.read(8), "little"))))
    return tensor_names


AHEAD = 1
"""Steps that are asked for before the answer to the one before has been read, so that vLLM never
waits for us."""


class VllmEngine:
    """Drives one vLLM process; the methods are those of `decode.Engine`, and one thread calls them.

    It keeps nothing of unfinished rollouts (`new_tokens`): a process that comes after it generates
    them anew.
    """

    def __init__(
        self,
        model: Model | str | Path,
        *,
        slots: int,
        context_tokens: int,
        sampling: Sampling,
        end_tokens: Sequence[int],
        stop: StopStrings | None = None,
        python: str | None = None,
        threads: int = 1,
        device: str = "cpu",
        cache_bytes: int | None = None,
        on_update: Literal["keep", "recompute"] = "keep",
        eager: bool = True,
        page_tokens: int | None = None,
        prefill_tokens: int = 8192,
        deadline_s: float = Limits.stuck_s,
        start_s: float = Limits.start_s,
        server: Path = SERVER,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Start vLLM for up to `slots` rollouts of at most `context_tokens` tokens.

        Args:
            model: a folder that both transformers and vLLM load; its parameters are what `tensors`
                holds.
            stop: strings at which rollouts end; looked for here, vLLM knows none.
            python: interpreter that has vLLM; None: this one, or the one that DATAFLOW_VLLM_PYTHON
                names.
            threads: of vLLM's process, on processors.
            device: "cpu", or "cuda:N", which vLLM shares with `tensors`.
            cache_bytes: of vLLM's KV-cache; None: `slots` full rollouts on processors, as far as
                half of what is free allows, vLLM's own choice on a GPU.
            on_update: keep the keys and values of unfinished rollouts when weights change, or
                recompute them.
            eager: without torch.compile and CUDA graphs.
            page_tokens: of a page of vLLM's KV-cache; None: 32 on processors, vLLM's own choice on
                a GPU.
            prefill_tokens: most tokens of one forward pass (at least `slots` and `context_tokens`).
            deadline_s: longest wait for one answer of vLLM's process.
            start_s: longest wait until it is ready.

        Raises:
            ModelError: there is no vLLM, it cannot load the model, or it does not know the
                parameters' names.
        """
        if not isinstance(model, Model):
            model = Model(str(model))
        self.slots = slots
        self.context_tokens = context_tokens
        self.sampling = sampling
        self.version = 0
        self.steps = 0
        self.drawn = 0
        self.looked = 0
        self._stop = stop
        self._deadline_s = deadline_s
        self._ends = frozenset(end_tokens)
        self._rows: dict[int, Live] = {}
        self._ended: list[EndedRollout] = []
        self._gone: list[int] = []
        self._unanswered = 0
        self._born = 0
        self._may_stop: WeakKeyDictionary[StopStrings, AnyArray] = WeakKeyDictionary()
        python = interpreter(python, environment)
        module = load_model(model)
        folder = _folder(model)
        check_names(model, dict(module.named_parameters()), folder)
        self.vocabulary = int(module.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
        self._weights = VllmWeights(module, model.dtype, device)
        self.tensors: dict[str, torch.Tensor] = self._weights.tensors
        del module
        self._process = ServerProcess(
            [python, str(server)],
            environment_of(python, threads, device, environment),
            self._weights.files,
        )
        request = {
            "op": "open",
            "model": str(folder),
            "dtype": model.dtype,
            "trust_remote_code": model.trust_remote_code,
            "slots": slots,
            "context_tokens": context_tokens,
            "cache_bytes": cache_bytes,
            "cache_budget": host_budget(),
            "page_tokens": page_tokens,
            "prefill_tokens": prefill_tokens,
            "on_update": on_update,
            "eager": eager,
            "weights": self._weights.opening(),
        }
        try:
            self._process.send(request, "starting", start_s)
            self.about = self._process.receive("loading the model", start_s)
        except WorkerDied as error:
            self.close()
            missing = f"; install vLLM: {INSTALL}" if "ModuleNotFoundError" in str(error) else ""
            raise ModelError(
                f"vLLM cannot load model '{model.name}' with {python}: {error}{missing}"
            ) from error
        if self.about["platform"] != device.partition(":")[0]:
            self.close()
            raise ModelError(
                f"engine 'vllm' was asked to decode on {device}, but the vLLM of {python} is built"
                f" for {self.about['platform']}; name the interpreter of another environment, or"
                " another device"
            )

    @property
    def pid(self) -> int:
        """The number of vLLM's process."""
        return self._process.pid

    @property
    def live(self) -> int:
        """Rollouts that have started and not ended."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Always none: vLLM manages its memory itself."""
        return 0

    @property
    def free(self) -> int:
        """Rollouts that may start now."""
        return self.slots - self.live

    @property
    def spare_pages(self) -> int:
        """Pages that starting rollouts may take, as far as we know: vLLM keeps that account
        itself.
        """
        return 0

    def fitting(self, tokens: int, wanted: int, pages: int, *, idle: bool) -> tuple[int, int]:
        """How many of `wanted` rollouts fit, and the pages they take: all, and none that we count.

        Where vLLM's KV-cache is too small for all of them it decodes some later.
        """
        return wanted, 0

    def step(self, starts: Sequence[PromptStart] = ()) -> list[EndedRollout]:
        """Have vLLM start rollouts and make one more step; the rollouts known to have ended.

        Raises WorkerDied when vLLM's process ended, failed, or did not answer within the deadline.
        """
        if self._rows or starts:
            new = [self._begin(start) for start in starts]
            gone, self._gone = self._gone, []
            self._process.send(
                {"op": "step", "starts": new, "aborts": gone}, "asking for a step", self._deadline_s
            )
            self._unanswered += 1
        self._settle(AHEAD)
        if not self._rows:
            self._settle(0)
        return self._take()

    def abort(self, tickets: Collection[int]) -> list[EndedRollout]:
        """Take rollouts out with what they have drawn; tickets that are not live are passed
        over.
        """
        rows = [self._rows.pop(ticket).row() for ticket in tickets if ticket in self._rows]
        self._gone += [row.ticket for row in rows]
        return [row.ended(ABORTED) for row in rows]

    def progress(self, ticket: int) -> Row | None:
        """A live rollout as it is now; None when it has ended or never started."""
        return self._rows[ticket].row() if ticket in self._rows else None

    def new_tokens(
        self, since: Callable[[int], int], least: int
    ) -> list[tuple[int, PartialRollout]]:
        """Nothing: rollouts begin anew after a crash, as vLLM starts requests from a prompt
        alone.
        """
        return []

    def adopted(self, version: int) -> None:
        """New weights of this version are in `tensors`: returns once vLLM has taken them.

        Tokens of steps that were asked for before are told apart by the version that comes with
        them. Raises WorkerDied as `step` does.
        """
        request = {"op": "update", "version": version, "weights": self._weights.offer()}
        self._process.send(request, "offering weights", self._deadline_s)
        self._settle(0)
        self._process.receive(f"taking version {version}", self._deadline_s)
        self.version = version

    def close(self) -> None:
        """End vLLM's process and give up all rollouts."""
        self._rows.clear()
        self._process.close()
        self._weights.close()
        self.tensors = {}

    def _begin(self, start: PromptStart) -> dict[str, Any]:
        """Note the rollouts of a prompt, and the request that starts them."""
        sampling = start.sampling if start.sampling is not None else self.sampling
        stop = start.stop if start.stop is not None else self._stop
        if stop is not None and stop not in self._may_stop:
            self._may_stop[stop] = stop.may_stop(self.vocabulary).numpy()
        for ticket, seed in zip(start.tickets, start.seeds, strict=True):
            self._rows[ticket] = Live(start, ticket, self._born, seed, sampling, stop)
            self._born += 1
        return {
            "prompt": start.prompt.astype("<i4").tobytes(),
            "most": start.limit - len(start.prompt),
            "tickets": [int(ticket) for ticket in start.tickets],
            "seeds": [int(seed) for seed in start.seeds],
            "sampling": dataclasses.asdict(sampling),
            "ends": sorted(end for end in self._ends if 0 <= end < self.vocabulary),
        }

    def _settle(self, most: int) -> None:
        """Read answers until at most this many steps are unanswered."""
        while self._unanswered > most:
            self._note(self._process.receive("decoding", self._deadline_s))
            self._unanswered -= 1

    def _note(self, stepped: Mapping[str, Any]) -> None:
        """What a step drew, and what ended with it."""
        version = stepped["version"]
        tickets = np.frombuffer(stepped["tickets"], "<i8").tolist()
        tokens = np.frombuffer(stepped["tokens"], "<i4").tolist()
        logprobs = np.frombuffer(stepped["logprobs"], "<f4").tolist()
        self.steps += bool(tickets)
        for ticket, token, logprob in zip(tickets, tokens, logprobs, strict=True):
            live = self._rows.get(ticket)
            if live is None:
                continue
            self.drawn += 1
            self.looked += len(live.start.prompt) + len(live.tokens)
            if not np.isfinite(logprob):
                self._over(live, BROKEN)
                continue
            live.tokens.append(token)
            live.logprobs.append(0.0 if live.sampling.temperature == 0.0 else logprob)
            live.versions.append(version)
            text = self._stopped_text(live)
            if text is not None:
                self._over(live, STOPPED, text)
        for ticket, reason in zip(stepped["ended"], stepped["reasons"], strict=True):
            live = self._rows.get(ticket)
            if live is None:
                continue
            at_end = live.tokens[-1:] and live.tokens[-1] in self._ends
            self._over(live, STOPPED if at_end else TOO_LONG if reason == "length" else BROKEN)

    def _stopped_text(self, live: Live) -> str | None:
        """The completion before a stop string that its newest token ended; None where there is
        none.
        """
        token = live.tokens[-1]
        if live.stop is None or token in self._ends or not self._may_stop[live.stop][token]:
            return None
        return live.stop.find(np.array(live.tokens))

    def _over(self, live: Live, reason: int, text: str | None = None) -> None:
        """A rollout has ended; the next step tells vLLM, in case it still runs there."""
        del self._rows[live.ticket]
        self._gone.append(live.ticket)
        self._ended.append(live.row().ended(reason, text))

    def _take(self) -> list[EndedRollout]:
        """The rollouts that have ended since the last time."""
        ended, self._ended = self._ended, []
        return ended


def _folder(model: Model) -> Path:
    """Where the model's files are on this machine."""
    if (local := folder_here(model.source)) is not None:
        return local
    from transformers.utils.hub import cached_file

    config_file = cached_file(model.source, "config.json", revision=model.revision)
    return Path(str(config_file)).parent


def build_vllm(declaration: GeneratorKnobs, context: Context) -> BuiltEngine:
    config, generation = load_configs(declaration.model)
    if kinds := changing_rope(config.get_text_config()):
        raise ModelError(
            f"model '{declaration.model.name}' has other rope factors for long sequences than for"
            " short ones; found "
            f'{sorted(kinds)}, of which vLLM chooses by a rule of its own; use engine="native"'
        )
    tokenizer = load_tokenizer(declaration.model)
    holder = SimpleNamespace(config=config, generation_config=generation)
    vocabulary = int(config.get_text_config().vocab_size)
    ends, stop = stops_of(tokenizer, holder, declaration.stop, vocabulary, chat=declaration.chat)
    engine = VllmEngine(
        declaration.model,
        slots=declaration.slots,
        context_tokens=context_tokens_of(declaration, config),
        sampling=sampling_of(declaration),
        end_tokens=sorted(ends),
        stop=StopStrings(tokenizer, stop) if stop else None,
        threads=context.devices.threads,
        device=context.devices.device,
        cache_bytes=declaration.cache_bytes,
        on_update=declaration.on_update,
        start_s=context.run.limits.start_s,
        deadline_s=context.run.limits.stuck_s,
    )
    return BuiltEngine(engine, tokenizer, ends)
