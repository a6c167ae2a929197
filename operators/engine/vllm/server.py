"""vLLM's process: makes one step of vLLM's engine for each request, and has its ranks take weights
in between.

consumes: requests of `messages` from a socket
produces: tokens with the log-probabilities and the version that they were drawn with
waits for: the next request
unblocked by: a request, the end of the stream, or the death of its parent; the last two end it

vLLM's scheduler runs in this process, and so does a model of one rank; of several ranks each has a
process below. Between two steps nothing is under way, so weights change there, unfinished rollouts
go on, and every token's version is the one its step ran with.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from dataflow.system.messages import Channel
from operators.engine.vllm.adapter_weights import NUMBER
from operators.engine.vllm.messages import (
    CODEC,
    Failed,
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
from operators.engine.vllm.rank import EXTENSION, memory_unnamed

LOOK_S = 1.0
"""Between two looks whether the parent is still there."""
SEND_S = 600.0
"""Longest that the parent may leave an answer unread."""
LISTEN_S = 0.005
"""Between two looks for a version, where ranks are other processes, which a look holds up."""
PAGE_TOKENS = 32
"""Of a page on processors, where vLLM would take 128: siblings share whole pages of their
prompt."""


class Server:
    """vLLM's engine, and what its requests are."""

    def __init__(self, opened: Open) -> None:
        """Load the model, and open the ranks' ends of the weight plane."""
        from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found,unused-ignore]
        from vllm.platforms import current_platform  # type: ignore[import-not-found,unused-ignore]
        from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found,unused-ignore]

        context, slots = opened.context_tokens, opened.slots
        self.platform = current_platform.device_type
        self._recomputes = opened.recomputes
        self._ranks = opened.ranks
        self._version = 0
        self._updates = 0
        self._unprefilled: dict[int, tuple[Start, int]] = {}
        self._offered, self._listened = Offered(), 0.0
        self._has_plane = False
        is_cpu = self.platform == "cpu"
        settings: dict[str, Any] = {
            "max_num_batched_tokens": max(opened.prefill_tokens, slots, context),
            # a seeded rollout in chunks ends vLLM 0.32 on processors
            "enable_chunked_prefill": not is_cpu,
            "enforce_eager": is_cpu,
            "enable_prefix_caching": True,
        }
        self._adapters: Any = None
        """What every rollout names, where the model has adapters."""
        if opened.adapters is not None:
            from vllm.lora.request import LoRARequest  # type: ignore[import-not-found,unused-ignore]

            self._adapters = LoRARequest("adapters", NUMBER, "/in/memory")
            settings |= {
                "enable_lora": True,
                "max_loras": 1,
                "max_lora_rank": opened.adapters.room,
                "lora_target_modules": sorted(
                    {path.rpartition(".")[2] for path in opened.adapters.layers}
                ),
            }
        arguments = EngineArgs(
            model=opened.model,
            dtype=opened.dtype,
            skip_tokenizer_init=True,
            trust_remote_code=opened.trust_remote_code,
            max_model_len=context,
            max_num_seqs=slots,
            tensor_parallel_size=opened.ranks,
            distributed_executor_backend="uni" if opened.ranks == 1 else "mp",
            block_size=opened.page_tokens or (PAGE_TOKENS if is_cpu else None),
            kv_cache_memory_bytes=opened.cache_bytes,
            logprobs_mode="processed_logprobs",
            async_scheduling=False,
            disable_log_stats=True,
            worker_extension_cls=EXTENSION,
            **{**settings, **opened.arguments},
        )
        config = arguments.create_engine_config()
        if config.cache_config.kv_cache_memory_bytes is None and is_cpu:
            config.cache_config.kv_cache_memory_bytes = cache_room(
                config, slots, context, opened.cache_budget // opened.ranks
            )
        self._engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        memory_unnamed()
        self._all("memory_unnamed")
        self.bytes_held: tuple[int, ...] = ()
        self.unseen: tuple[str, ...] = ()
        pieces: list[Any] = []
        if opened.site is not None or opened.adapters is not None:
            layers, start = (
                (opened.adapters.layers, opened.adapters.start) if opened.adapters else ({}, None)
            )
            pieces = self._all("weights_record", opened.shapes, layers, start)
        if opened.site is not None:
            ends = self._all(
                "weights_open",
                msgspec.msgpack.encode(opened.site),
                pieces,
                msgspec.msgpack.encode(opened.limits),
                opened.attempt,
            )
            self.bytes_held = tuple(nbytes for nbytes, _ in ends)
            self.unseen = tuple(sorted({kind for _, unseen in ends for kind in unseen}))
            self._has_plane = True

    def step(self, request: Step) -> Stepped:
        """Take rollouts out, start others and make one step; its new tokens, and the rollouts that
        ended.
        """
        for ticket in request.aborts:
            self._unprefilled.pop(ticket, None)
        self._engine.abort_request([str(ticket) for ticket in request.aborts])
        tickets: list[int] = []
        tokens: list[int] = []
        logprobs: list[float] = []
        ended: dict[int, str] = {}
        for start in request.starts:
            for ticket, seed in zip(start.tickets, start.seeds, strict=True):
                self._unprefilled[ticket] = start, seed
                try:
                    self._add(ticket)
                except Exception as error:
                    print(
                        f"vLLM does not take rollout {ticket}: {error}", file=sys.stderr, flush=True
                    )
                    del self._unprefilled[ticket]
                    ended[ticket] = "error"
        for output in self._engine.step() if self._engine.has_unfinished_requests() else ():
            ticket, new = int(output.request_id), output.outputs[0]
            if new.token_ids:
                tickets += [ticket] * len(new.token_ids)
                tokens += new.token_ids
                logprobs += new.logprobs.logprobs
            if new.token_ids or output.finished:
                self._unprefilled.pop(ticket, None)
            if output.finished:
                ended[ticket] = new.finish_reason or "error"
        return Stepped(
            version=self._version,
            tickets=np.array(tickets, np.int64),
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            ended=tuple(ended),
            reasons=tuple(ended.values()),
            offered=self.listen(),
        )

    def listen(self, request: Listen | None = None) -> Offered:
        """What the trainer offers, as of a moment ago."""
        now = time.monotonic()
        if self._has_plane and (self._ranks == 1 or now - self._listened >= LISTEN_S):
            self._listened = now
            version, note = self._all("weights_offered")[0]
            self._offered = Offered(version=version, note=note)
        return self._offered

    def update(self, request: Update) -> Updated:
        """Take what is offered, on all ranks or on none; tokens from the next step on are drawn
        from it.

        Prefixes computed before are not shared with rollouts that start later: their salt differs.
        Rollouts whose prompt is still to be computed get the new salt. `recompute` has vLLM compute
        all prefixes again.
        """
        began = time.monotonic()
        if self._take():
            self._engine.set_weight_version(str(self._version))
            self._updates += 1
            self._engine.abort_request([str(ticket) for ticket in self._unprefilled])
            for ticket in self._unprefilled:
                self._add(ticket)
            if self._recomputes:
                self._engine.reset_prefix_cache(reset_running_requests=True)
        held_s = time.monotonic() - began
        self._listened = 0.0
        return Updated(version=self._version, seconds=held_s, offered=self.listen())

    def cache_tokens(self) -> int:
        """Positions that vLLM's KV-cache holds."""
        config = self._engine.vllm_config.cache_config
        return int(config.num_gpu_blocks * config.block_size)

    def close(self) -> None:
        """Leave the weight plane, and end the ranks."""
        if self._has_plane:
            self._all("weights_close")
        self._engine.engine_core.shutdown()

    def _take(self) -> bool:
        offer = self._all("weights_verify")[0]
        if offer is None:
            return False
        if self._ranks > 1:
            entered = self._all(
                "weights_enter", *(offer[k] for k in ("segment", "version", "layout"))
            )
            if not all(entered):
                self._all("weights_decline")
                return False
        (self._version,) = set(self._all("weights_adopt"))
        return True

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        """What a method of `rank.RankExtension` returns on each rank. RuntimeError where one could
        not do it.
        """
        answers = self._engine.collective_rpc(method, args=arguments)
        for rank, answer in enumerate(answers):
            if "failed" in answer:
                raise RuntimeError(f"rank {rank}: {answer['failed']}")
        return [answer["done"] for answer in answers]

    def _add(self, ticket: int) -> None:
        from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found,unused-ignore]

        start, seed = self._unprefilled[ticket]
        self._engine.add_request(
            str(ticket),
            {"prompt_token_ids": start.prompt.tolist(), "cache_salt": str(self._updates)},
            SamplingParams(
                **start.sampling,
                seed=seed & (2**63 - 1),
                max_tokens=start.most,
                stop_token_ids=list(start.ends),
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                flat_logprobs=True,
                output_kind=RequestOutputKind.DELTA,
            ),
            lora_request=self._adapters,
        )


def cache_room(config: Any, slots: int, context: int, budget: int) -> int:
    """Bytes of keys and values of `slots` full rows, each in whole pages, and vLLM's own empty
    page; of fewer rows, at least one, where these would exceed the budget in bytes. Of one rank.
    """
    model, parallel = config.model_config, config.parallel_config
    heads, layers = model.get_num_kv_heads(parallel), model.get_num_layers(parallel)
    page = config.cache_config.block_size
    page_bytes = int(2 * layers * heads * model.get_head_size() * model.dtype.itemsize * page)
    row_bytes: int = page_bytes * -(-context // page)
    return max(1, min(slots, budget // row_bytes)) * row_bytes + page_bytes


def next_request(channel: Channel[Any], parent: int) -> Any:
    """However long it takes. EOFError when the parent is gone."""
    while not channel.readable(LOOK_S):
        if os.getppid() != parent:
            raise EOFError("the parent has died")
    return channel.receive(SEND_S)


def serve(channel: Channel[Any], parent: int) -> None:
    """Answer requests. EOFError at the end of the stream."""
    server = Server(next_request(channel, parent))
    channel.send(
        Ready(
            vllm=sys.modules["vllm"].__version__,
            platform=server.platform,
            cache_tokens=server.cache_tokens(),
            bytes_held=server.bytes_held,
            unseen=server.unseen,
        )
    )
    answers: dict[type[Any], Callable[[Any], Any]]
    answers = {Step: server.step, Listen: server.listen, Update: server.update}
    try:
        while True:
            request = next_request(channel, parent)
            channel.send(answers[type(request)](request))
    except EOFError:
        server.close()
        raise


def main(end: socket.socket) -> int:
    """Serve on this socket; the exit code."""
    channel: Channel[Any] = Channel(end, CODEC, SEND_S)
    try:
        serve(channel, os.getppid())
    except (EOFError, ConnectionError):
        return 0
    except Exception as error:
        traceback.print_exc()
        channel.send(Failed(f"{type(error).__name__}: {error}"))
        return 1
    return 0
