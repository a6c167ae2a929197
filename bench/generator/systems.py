"""The systems of the generator bench: our engine, vLLM behind the same methods, and transformers in
two ways.

All draw from the whole distribution at temperature 1 and know no end token; a rollout ends at its
limit. Ours and vLLM return the log-probability of every token too.

ours           operators.engine as the generator drives it: a group starts as soon as all of it
               fits.
hf_generate    `model.generate` on static batches of in_flight rows, each as long as its longest
               rollout, which nobody knows beforehand; with a dynamic or a static cache, whichever
               was faster on the first batch.
hf_continuous  transformers' continuous batching, fed so that in_flight requests are in work and a
               few wait.
vllm_cpu       vLLM in a process of its own, fed like ours.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.generator.cases import CONTEXT_TOKENS, GROUP_SIZE, PAD, PROMPT_TOKENS, Load

PAGE_TOKENS = 32
"""Of transformers' continuous batching: small enough to share the greater part of a prompt."""
WAITING = 2 * GROUP_SIZE
"""Requests that wait inside transformers' continuous batching."""


class Late(RuntimeError):
    """A system that was not done in time."""


class Unavailable(RuntimeError):
    """A system that cannot run here, and why."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a system made of a load."""

    lengths: list[int]
    """Tokens of each rollout, in the order of the load."""
    seconds: float
    steady_tokens_per_s: float | None = None
    """Tokens per second as long as rollouts were waiting to start; None where nothing is known of
    it."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all rollouts over all the time."""
        return sum(self.lengths) / self.seconds


class System(Protocol):
    """One way to generate, with its model loaded."""

    about: str
    """Options that were chosen."""

    def warm(self, load: Load, deadline_s: float) -> Made:
        """Run the beginning of the load; choose among options."""

    def run(self, load: Load, deadline_s: float) -> Made:
        """Make every rollout of the load. Raises Late."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is equal for all systems."""

    folder: Path
    in_flight: int
    precision: str
    """float32 or bfloat16."""
    threads: int


class Driven:
    """An engine with the methods of operators.engine.decode.Engine."""

    def __init__(self, engine: Any, threads: int, about: str) -> None:
        """`engine` has as many slots as there are rollouts in flight."""
        self.about = about
        self._engine, self._threads = engine, threads

    def warm(self, load: Load, deadline_s: float) -> Made:
        """As many rollouts as are in flight."""
        return self.run(load.first(load.in_flight), deadline_s)

    def run(self, load: Load, deadline_s: float) -> Made:
        """Groups start in order, each as soon as it fits. Raises Late."""
        set_threads(self._threads)
        engine, lengths = self._engine, [0] * len(load.lengths)
        waiting = deque(range(len(load.prompts)))
        steady, drawn = None, engine.drawn
        began = time.perf_counter()
        while waiting or engine.live:
            seconds = time.perf_counter() - began
            if seconds > deadline_s:
                unfinished = [ticket for ticket, length in enumerate(lengths) if not length]
                engine.abort(unfinished)
                raise Late(
                    f"{len(unfinished)} of {len(lengths)} rollouts were not done after"
                    f" {deadline_s:g} s"
                )
            if not waiting and steady is None:
                steady = (engine.drawn - drawn) / seconds
            for row in engine.step(self._starts(load, waiting)):
                lengths[row.ticket] = len(row.tokens) - row.start
        return Made(
            lengths=lengths, seconds=time.perf_counter() - began, steady_tokens_per_s=steady
        )

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def _starts(self, load: Load, waiting: deque[int]) -> list[Any]:
        """Groups that start now; rollouts of a group that have limits of their own share its
        prompt's pages.
        """
        from operators.engine.interface import PromptStart

        starts = []
        free = self._engine.free
        while waiting and free >= GROUP_SIZE:
            group = waiting.popleft()
            tickets = range(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
            for length in sorted({load.lengths[ticket] for ticket in tickets}):
                alike = [ticket for ticket in tickets if load.lengths[ticket] == length]
                limit = PROMPT_TOKENS + length
                starts.append(
                    PromptStart(prompt=load.prompts[group], limit=limit, tickets=alike, seeds=alike)
                )
            free -= GROUP_SIZE
        return starts


def ours(setting: Setting) -> System:
    """Our engine, made as the generator makes it."""
    from dataflow.model import Model
    from dataflow.runtime import Context, DeviceShare
    from operators.engine.build import make_engine
    from operators.generator import Generator

    generator = Generator(
        Model(str(setting.folder), dtype=setting.precision),
        slots=setting.in_flight,
        context_tokens=CONTEXT_TOKENS,
    )
    return Driven(
        make_engine(
            generator, Context(node="bench", devices=DeviceShare(threads=setting.threads))
        ).engine,
        setting.threads,
        "",
    )


def vllm_cpu(setting: Setting) -> System:
    """vLLM, from the environment that DATAFLOW_VLLM_PYTHON names; compiled where its environment
    can compile.
    """
    from dataflow.model import Model
    from operators.engine.sampler import Sampling
    from operators.engine.vllm.engine import VllmEngine
    from operators.models.folders import ModelError

    problem = ""
    for eager in (False, True):
        try:
            engine = VllmEngine(
                Model(str(setting.folder), dtype=setting.precision),
                slots=setting.in_flight,
                context_tokens=CONTEXT_TOKENS,
                sampling=Sampling(),
                end_tokens=(),
                threads=setting.threads,
                python=os.environ.get("DATAFLOW_VLLM_PYTHON"),
                arguments={"enforce_eager": eager},
            )
            return Driven(engine, setting.threads, "eager" if eager else "compiled")
        except ModelError as error:
            problem = str(error)
    raise Unavailable(problem)


class HfGenerate:
    """`model.generate`, one static batch after the other."""

    def __init__(self, setting: Setting) -> None:
        """Load the model."""
        self.about = "dynamic cache"
        self._setting, self._cache = setting, "dynamic"
        self._model = hf_model(setting)

    def warm(self, load: Load, deadline_s: float) -> Made:
        """The first group, then the first batch with either cache: the faster one is kept."""
        self.run(load.first(GROUP_SIZE), deadline_s)
        batch, by_cache = load.first(load.in_flight), {}
        for cache in ("static", "dynamic"):
            self._cache = cache
            by_cache[cache] = self.run(batch, deadline_s)
        self._cache = min(by_cache, key=lambda cache: by_cache[cache].seconds)
        self.about = f"{self._cache} cache"
        return by_cache[self._cache]

    def run(self, load: Load, deadline_s: float) -> Made:
        """Rollouts in order, in_flight of them at once, prompts repeated. Raises Late."""
        import torch

        set_threads(self._setting.threads)
        lengths: list[int] = []
        began = time.perf_counter()
        for first in range(0, len(load.lengths), load.in_flight):
            lengths_wanted = load.lengths[first : first + load.in_flight]
            ids = torch.tensor(
                [load.prompt(first + row).tolist() for row in range(len(lengths_wanted))]
            )
            left_s = deadline_s - (time.perf_counter() - began)
            with torch.inference_mode():
                tokens = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max(lengths_wanted),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    pad_token_id=PAD,
                    eos_token_id=None,
                    max_time=left_s,
                    cache_implementation=None if self._cache == "dynamic" else self._cache,
                )
            drawn = tokens.shape[1] - ids.shape[1]
            if drawn < max(lengths_wanted):
                raise Late(
                    f"only {first} of {len(load.lengths)} rollouts were done after {deadline_s:g} s"
                )
            lengths += [min(drawn, length) for length in lengths_wanted]
        return Made(lengths=lengths, seconds=time.perf_counter() - began)

    def close(self) -> None:
        """Nothing is held beside the model."""


class HfContinuous:
    """transformers' continuous batching, in its own thread."""

    def __init__(self, setting: Setting) -> None:
        """Load the model."""
        self.about = f"pages of {PAGE_TOKENS}"
        self._setting = setting
        self._model = hf_model(setting)

    def warm(self, load: Load, deadline_s: float) -> Made:
        """A quarter of what is in flight: it is slow."""
        return self.run(load.first(load.in_flight // 4), deadline_s)

    def run(self, load: Load, deadline_s: float) -> Made:
        """Requests in order; a new one as soon as one has ended. Raises Late."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        set_threads(self._setting.threads)
        sampled = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=1,
            eos_token_id=-1,
            pad_token_id=PAD,
        )
        batching = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            max_requests_per_batch=load.in_flight,
            max_batch_tokens=load.in_flight + PROMPT_TOKENS,
            num_blocks=(load.in_flight + WAITING) * CONTEXT_TOKENS // PAGE_TOKENS,
        )
        manager = self._model.init_continuous_batching(
            generation_config=sampled, continuous_batching_config=batching
        )
        manager.start()
        try:
            manager.add_request(load.prompt(0).tolist(), request_id="warm", max_new_tokens=1)
            self._result(manager, time.perf_counter() + deadline_s)
            return self._served(manager, load, deadline_s)
        finally:
            manager.stop(block=True, timeout=deadline_s)

    def _served(self, manager: Any, load: Load, deadline_s: float) -> Made:
        lengths, sent = [0] * len(load.lengths), 0
        began = time.perf_counter()
        for done in range(len(lengths)):
            while sent < min(len(lengths), done + load.in_flight + WAITING):
                manager.add_request(
                    load.prompt(sent).tolist(),
                    request_id=str(sent),
                    max_new_tokens=load.lengths[sent],
                    eos_token_id=-1,
                )
                sent += 1
            result = self._result(manager, began + deadline_s)
            lengths[int(result.request_id)] = len(result.generated_tokens)
        return Made(lengths=lengths, seconds=time.perf_counter() - began)

    def _result(self, manager: Any, deadline: float) -> Any:
        while time.perf_counter() < deadline:
            result = manager.get_result(timeout=1.0)
            if result is not None and result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result.error}")
            if result is not None and result.is_finished():
                return result
            if not manager.is_running():
                raise RuntimeError(
                    "the thread of continuous batching has ended; see what it logged"
                )
        raise Late("continuous batching was not done in time")

    def close(self) -> None:
        """Nothing is held beside the model."""


OPEN: dict[str, Callable[[Setting], System]] = {
    "ours": ours,
    "hf_generate": HfGenerate,
    "hf_continuous": HfContinuous,
    "vllm_cpu": vllm_cpu,
}
"""How to open each system; raises Unavailable."""

SYSTEMS: Sequence[str] = tuple(OPEN)


def hf_model(setting: Setting) -> Any:
    """The policy as transformers loads it."""
    import torch
    from transformers import AutoModelForCausalLM

    from operators.models.loading import no_progress_bar

    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(
            setting.folder, dtype=getattr(torch, setting.precision)
        )
    return model.eval().requires_grad_(False)


def set_threads(threads: int) -> None:
    """Of torch, in this process."""
    import torch

    torch.set_num_threads(threads)
