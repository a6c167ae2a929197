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
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import structlog
import torch
import xxhash

from dataflow.errors import WorkerDied
from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.limits import Limits
from dataflow.model import Model
from dataflow.records import AnyArray
from dataflow.runtime import Context
from dataflow.tokens.rollout_tokens import RolloutTokens
from dataflow.weight_ends import WeightSite
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
    begun,
)
from operators.engine.parking import new_tokens_of
from operators.engine.sampler import Sampling
from operators.engine.stop_strings import StopStrings, stops_of
from operators.engine.vllm.messages import (
    Listen,
    Offered,
    Open,
    Ready,
    Start,
    Step,
    Stepped,
    Update,
    Updated,
)
from operators.engine.vllm.outline import outlined
from operators.engine.vllm.process import (
    INSTALL,
    SERVER,
    ServerProcess,
    environment_of,
    interpreter,
)
from operators.generator import GeneratorKnobs
from operators.models.borders import changing_rope
from operators.models.folders import ModelError
from operators.models.loading import load_configs, load_tokenizer
from operators.ranks.weights import opens_for_ranks

__all__ = ["VllmEngine", "VllmWeights", "build_vllm"]


@dataclass
class Live:
    """A rollout that vLLM decodes."""

    begun: Row
    """As it started, with what it had drawn before."""
    tokens: list[int] = field(default_factory=list)
    """Drawn since, and what belongs to each."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def row(self) -> Row:
        """Prompt and completion so far."""
        drawn = RolloutTokens.drawn(
            np.array(self.tokens), np.array(self.logprobs), np.array(self.versions)
        )
        return dataclasses.replace(
            self.begun, tokens=RolloutTokens.joined([self.begun.tokens, drawn])
        )

    @property
    def completion(self) -> AnyArray:
        """Its tokens."""
        before = self.begun.tokens.ids[self.begun.start :]
        return np.concatenate([before, np.array(self.tokens, np.int64)])


AHEAD = 1
"""Steps that are asked for before the answer to the one before has been read, so that vLLM never
waits for us."""


class VllmEngine:
    """Drives one vLLM; the methods are those of `decode.Engine`, and one thread calls them."""

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
        ranks: int = 1,
        cache_bytes: int | None = None,
        on_update: Literal["keep", "recompute"] = "keep",
        page_tokens: int | None = None,
        prefill_tokens: int = 8192,
        arguments: Mapping[str, Any] | None = None,
        site: WeightSite | None = None,
        attempt: int = 0,
        limits: Limits | None = None,
        deadline_s: float = Limits.stuck_s,
        start_s: float = Limits.start_s,
        server: Path = SERVER,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Start vLLM for up to `slots` rollouts of at most `context_tokens` tokens.

        Args:
            model: a folder that both transformers and vLLM load.
            stop: strings at which rollouts end; looked for here, vLLM knows none.
            python: interpreter that has vLLM; None: this one, or the one that DATAFLOW_VLLM_PYTHON
                names.
            threads: of each of vLLM's ranks, on processors.
            device: "cpu", or "cuda:N", the first of its ranks'.
            ranks: tensor-parallel ones, each a process with a device of its own.
            cache_bytes: of each rank's KV-cache; None: `slots` full rollouts on processors, as far
                as half of what is free allows, vLLM's own choice on a GPU.
            on_update: keep the keys and values of unfinished rollouts when weights change, or
                recompute them.
            page_tokens: of a page of vLLM's KV-cache; None: 32 on processors, vLLM's own choice on
                a GPU.
            prefill_tokens: most tokens of one forward pass (at least `slots` and `context_tokens`).
            arguments: further ones of vLLM's `EngineArgs`, by name.
            site: where a trainer offers versions, as for other ranks of a reader; None: the weights
                stay those of the folder.
            attempt: the scheduler's, at this worker.
            deadline_s: longest wait for one answer of vLLM's process.
            start_s: longest wait until it is ready.

        Raises:
            ModelError: there is no vLLM, or it cannot load the model or take its weights.
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
        self.held_s: list[float] = []
        """What each update took, in which nothing was decoded."""
        self.tensors: Mapping[str, torch.Tensor] = {}
        """None: vLLM's ranks take versions themselves."""
        self._stop = stop
        self._deadline_s = deadline_s
        self._ends = frozenset(end_tokens)
        self._rows: dict[int, Live] = {}
        self._ended: list[EndedRollout] = []
        self._gone: list[int] = []
        self._unanswered = 0
        self._born = 0
        self._may_stop: WeakKeyDictionary[StopStrings, AnyArray] = WeakKeyDictionary()
        self._offered = Offered()
        self._has_stepped = False
        """Since `offered` was called last."""
        python = interpreter(python, environment)
        outline = outlined(model, site is not None)
        self.vocabulary = outline.vocabulary
        self._process = ServerProcess(
            [python, str(server)],
            environment_of(python, threads, device, environment, ranks),
            mark="" if site is None else _mark(site),
        )
        request = Open(
            model=str(outline.folder),
            dtype=model.dtype,
            trust_remote_code=model.trust_remote_code,
            slots=slots,
            context_tokens=context_tokens,
            prefill_tokens=prefill_tokens,
            ranks=ranks,
            cache_bytes=cache_bytes,
            cache_budget=host_budget(),
            page_tokens=page_tokens,
            recomputes=on_update == "recompute",
            arguments=dict(arguments or {}),
            shapes=outline.shapes,
            adapters=outline.adapters,
            site=site,
            attempt=attempt,
            limits=limits or Limits(),
        )
        try:
            self._process.send(request, "starting", start_s)
            self.about = self._process.receive(Ready, "loading the model", start_s)
        except WorkerDied as error:
            self.close()
            missing = f"; install vLLM: {INSTALL}" if "ModuleNotFoundError" in str(error) else ""
            raise ModelError(
                f"vLLM cannot load model '{model.name}' with {python}: {error}{missing}"
            ) from error
        if self.about.platform != device.partition(":")[0]:
            self.close()
            raise ModelError(
                f"engine 'vllm' was asked to decode on {device}, but the vLLM of {python} is built"
                f" for {self.about.platform}; name the interpreter of another environment, or"
                " another device"
            )
        if self.about.unseen:
            structlog.get_logger().info(
                "vLLM's layers compute with the weights that they get, not seen of some kinds",
                kinds=list(self.about.unseen),
            )

    @property
    def pid(self) -> int:
        """The number of vLLM's process."""
        return self._process.pid

    @property
    def live(self) -> int:
        """Rollouts that have started, and whose end `step` has not told."""
        return len(self._rows) + len(self._ended)

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
            if not set(self._gone).isdisjoint(
                ticket for start in starts for ticket in start.tickets
            ):
                self._settle(0)  # what is under way was drawn for rollouts before these
            new = tuple(request for start in starts for request in self._begin(start))
            gone, self._gone = tuple(self._gone), []
            self._process.send(Step(starts=new, aborts=gone), "asking for a step", self._deadline_s)
            self._unanswered += 1
            self._has_stepped = True
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
        wanted = set(tickets)
        ended = [row for row in self._ended if row.ticket in wanted]
        self._ended = [row for row in self._ended if row.ticket not in wanted]
        return [*ended, *(row.ended(ABORTED) for row in rows)]

    def progress(self, ticket: int) -> Row | None:
        """A live rollout as it is now; None when it has ended or never started."""
        return self._rows[ticket].row() if ticket in self._rows else None

    def new_tokens(
        self, since: Callable[[int], int], least: int
    ) -> list[tuple[int, PartialRollout]]:
        """As `decode.Engine.new_tokens`."""
        grown = [
            live.row()
            for ticket, live in self._rows.items()
            if len(live.begun.tokens) - live.begun.start + len(live.tokens) - since(ticket) >= least
        ]
        return new_tokens_of(grown, since, least)

    def offered(self) -> Offered:
        """What the trainer offers: as the last step told, or asked for where there was none."""
        if self._has_stepped:
            self._has_stepped = False
        else:
            self._settle(0)
            self._process.send(Listen(), "asking for offers", self._deadline_s)
            self._offered = self._process.receive(Offered, "listening", self._deadline_s)
        return self._offered

    def update(self) -> int:
        """Have vLLM's ranks take what is offered; the version in use from then on.

        Tokens of steps that were asked for before are told apart by the version that comes with
        them. Raises WorkerDied as `step` does.
        """
        self._process.send(Update(), "asking for an update", self._deadline_s)
        self._settle(0)
        updated = self._process.receive(Updated, "taking a version", self._deadline_s)
        self._offered = updated.offered
        self.held_s.append(updated.seconds)
        return updated.version

    def adopted(self, version: int) -> None:
        """This version is in use, as `update` has said."""
        self.version = version

    def close(self) -> None:
        """End vLLM's process and give up all rollouts."""
        self._rows.clear()
        self._process.close()

    def _begin(self, start: PromptStart) -> list[Start]:
        """Note the rollouts of a prompt, and the requests that start them: those that have drawn
        nothing yet together.
        """
        rows = begun(start, self._born, self.sampling, self._stop, masks=False)
        self._born += len(rows)
        stop = rows[0].stop
        if stop is not None and stop not in self._may_stop:
            self._may_stop[stop] = stop.may_stop(self.vocabulary).numpy()
        self._rows |= {row.ticket: Live(row) for row in rows}
        new = [row for row in rows if len(row.tokens) == row.start]
        requests = [self._request(new, new[0].tokens.ids)] if new else []
        return requests + [
            self._request([row], row.tokens.ids) for row in rows if len(row.tokens) > row.start
        ]

    def _request(self, rows: Sequence[Row], tokens: AnyArray) -> Start:
        first = rows[0]
        return Start(
            prompt=tokens.astype(np.int32),
            most=first.limit - len(tokens),
            tickets=tuple(int(row.ticket) for row in rows),
            seeds=tuple(_seed(row) for row in rows),
            sampling=dataclasses.asdict(first.sampling),
            ends=tuple(sorted(end for end in self._ends if 0 <= end < self.vocabulary)),
        )

    def _settle(self, most: int) -> None:
        """Read answers until at most this many steps are unanswered."""
        while self._unanswered > most:
            self._note(self._process.receive(Stepped, "decoding", self._deadline_s))
            self._unanswered -= 1

    def _note(self, stepped: Stepped) -> None:
        """What a step drew, and what ended with it."""
        self._offered = stepped.offered
        tickets = stepped.tickets.tolist()
        tokens, logprobs = stepped.tokens.tolist(), stepped.logprobs.tolist()
        self.steps += bool(tickets)
        for ticket, token, logprob in zip(tickets, tokens, logprobs, strict=True):
            live = self._rows.get(ticket)
            if live is None:
                continue
            self.drawn += 1
            self.looked += len(live.begun.tokens) + len(live.tokens)
            if not np.isfinite(logprob):
                self._over(live, BROKEN)
                continue
            live.tokens.append(token)
            live.logprobs.append(0.0 if live.begun.sampling.temperature == 0.0 else logprob)
            live.versions.append(stepped.version)
            text = self._stopped_text(live)
            if text is not None:
                self._over(live, STOPPED, text)
        for ticket, reason in zip(stepped.ended, stepped.reasons, strict=True):
            live = self._rows.get(ticket)
            if live is None:
                continue
            at_end = live.tokens[-1:] and live.tokens[-1] in self._ends
            self._over(live, STOPPED if at_end else TOO_LONG if reason == "length" else BROKEN)

    def _stopped_text(self, live: Live) -> str | None:
        """The completion before a stop string that its newest token ended; None where there is
        none.
        """
        token, stop = live.tokens[-1], live.begun.stop
        if stop is None or token in self._ends or not self._may_stop[stop][token]:
            return None
        return stop.find(live.completion)

    def _over(self, live: Live, reason: int, text: str | None = None) -> None:
        """A rollout has ended; the next step tells vLLM, in case it still runs there."""
        del self._rows[live.begun.ticket]
        self._gone.append(live.begun.ticket)
        self._ended.append(live.row().ended(reason, text))

    def _take(self) -> list[EndedRollout]:
        """The rollouts that have ended since the last time."""
        ended, self._ended = self._ended, []
        return ended


class VllmWeights:
    """A `WeightsIn` with an end in each rank of vLLM: what one of them cannot hold, none takes.

    consumes: offers of the trainer, as vLLM's process tells of them
    produces: versions in use there
    waits for: vLLM's process, up to its deadline
    unblocked by: its answer, or its end
    """

    socket = None

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.version = -1
        """In use; that of the folder is none of the trainer's."""
        self.note: Mapping[str, int | float | str] = {}
        """The trainer's last."""

    def poll(self) -> Offered | None:
        """As of `WeightsIn`."""
        offered = self._engine.offered()
        self.note = offered.note
        return offered if offered.version >= 0 else None

    def adopt(self) -> int:
        """As of `WeightsIn`."""
        self.version = self._engine.update()
        return self.version


def _mark(site: WeightSite) -> str:
    """Of a replica, whichever of its processes it is."""
    return xxhash.xxh3_64_hexdigest(f"{site.folder}/{site.name}".encode())


def _seed(row: Row) -> int:
    """Of what a rollout draws from here on: its own, unless it goes on, where vLLM would draw the
    same noise for other tokens.
    """
    drawn = len(row.tokens) - row.start
    if not drawn:
        return int(row.seed)
    return xxhash.xxh3_64_intdigest(f"{int(row.seed)}/{drawn}".encode()) - (1 << 63)


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
    opens = opens_for_ranks(context.weights.reader)
    if opens is None and context.weights.reader is not None:
        raise ModelError(
            f"'{declaration.name}' runs on vLLM, whose processes take weights themselves; found a"
            ' run in one process; run it in processes, or use engine="native"'
        )
    engine = VllmEngine(
        declaration.model,
        slots=declaration.slots,
        context_tokens=context_tokens_of(declaration, config),
        sampling=sampling_of(declaration),
        end_tokens=sorted(ends),
        stop=StopStrings(tokenizer, stop) if stop else None,
        threads=context.devices.threads,
        device=context.devices.device,
        ranks=declaration.tensor_parallel,
        cache_bytes=declaration.cache_bytes,
        on_update=declaration.on_update,
        arguments=declaration.vllm,
        site=None if opens is None else opens.site,
        attempt=context.life.attempt,
        limits=context.run.limits,
        start_s=context.run.limits.start_s,
        deadline_s=context.run.limits.stuck_s,
    )
    reader = None if opens is None else functools.partial(VllmWeights, engine)
    return BuiltEngine(engine, tokenizer, ends, reader=reader)
