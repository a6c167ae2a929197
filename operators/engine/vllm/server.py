"""vLLM's process: makes one step of vLLM's engine for each request, and takes weights in between.

consumes: requests of `wire.py` from the socket whose number is its argument
produces: tokens with the log-probabilities and the version that they were drawn with
waits for: the next request
unblocked by: a request, the end of the stream, or the death of its parent; the last two end it

Started by path with the interpreter of vLLM's environment, so it imports its neighbours by path and
nothing else of this project. vLLM's engine runs in this process (no second one behind it): between
two steps nothing is under way, so weights change there, unfinished rollouts go on, and every
token's version is the one its step ran with. That is what `pause_generation(mode="keep")` reaches
for an engine that steps by itself.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from operators.engine.vllm.shared_tensors import unpack_handle
    from operators.engine.vllm.wire import ServerStream
else:
    from shared_tensors import unpack_handle
    from wire import ServerStream

LOOK_S = 1.0
"""Between two looks whether the parent is still there."""
SEND_S = 600.0
"""Longest that the parent may leave an answer unread."""
PAGE_TOKENS = 32
"""Of a page on processors, where vLLM would take 128: siblings share whole pages of their
prompt."""


class Server:
    """vLLM's engine, and what its requests are."""

    def __init__(self, opened: dict[str, Any]) -> None:
        """Load the model; `opened` is the `open` request."""
        from vllm.config import WeightTransferConfig  # type: ignore[import-not-found,unused-ignore]
        from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found,unused-ignore]
        from vllm.platforms import current_platform  # type: ignore[import-not-found,unused-ignore]
        from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found,unused-ignore]

        weights = opened["weights"]
        if "layout" in weights:
            from transfer import NAME, register  # type: ignore[import-not-found,unused-ignore]

            register()
            backend, start = NAME, weights
        else:
            backend, start = "ipc", {"packed": False}
        context, slots = opened["context_tokens"], opened["slots"]
        self.platform = current_platform.device_type
        self._recomputes = opened["on_update"] == "recompute"
        self._version = 0
        self._updates = 0
        self._unprefilled: dict[int, dict[str, Any]] = {}
        arguments = EngineArgs(
            model=opened["model"],
            dtype=opened["dtype"],
            skip_tokenizer_init=True,
            trust_remote_code=opened["trust_remote_code"],
            max_model_len=context,
            max_num_seqs=slots,
            max_num_batched_tokens=max(opened["prefill_tokens"], slots, context),
            # a seeded rollout in chunks ends vLLM 0.32 on processors
            enable_chunked_prefill=self.platform != "cpu",
            enforce_eager=opened["eager"],
            block_size=opened["page_tokens"] or (PAGE_TOKENS if self.platform == "cpu" else None),
            kv_cache_memory_bytes=opened["cache_bytes"],
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            async_scheduling=False,
            disable_log_stats=True,
            weight_transfer_config=WeightTransferConfig(backend=backend),
        )
        config = arguments.create_engine_config()
        if config.cache_config.kv_cache_memory_bytes is None and self.platform == "cpu":
            config.cache_config.kv_cache_memory_bytes = cache_room(
                config, slots, context, opened["cache_budget"]
            )
        self._engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": start})

    def step(self, starts: list[dict[str, Any]], aborts: list[int]) -> dict[str, Any]:
        """Take rollouts out, start others and make one step; its new tokens, and the rollouts that
        ended.
        """
        for ticket in aborts:
            self._unprefilled.pop(ticket, None)
        self._engine.abort_request([str(ticket) for ticket in aborts])
        tickets: list[int] = []
        tokens: list[int] = []
        logprobs: list[float] = []
        ended: list[int] = []
        reasons: list[str] = []
        for start in starts:
            for ticket, seed in zip(start["tickets"], start["seeds"], strict=True):
                self._unprefilled[ticket] = {**start, "seed": seed}
                try:
                    self._add(ticket)
                except Exception as error:
                    print(
                        f"vLLM does not take rollout {ticket}: {error}", file=sys.stderr, flush=True
                    )
                    del self._unprefilled[ticket]
                    ended.append(ticket)
                    reasons.append("error")
        for output in self._engine.step() if self._engine.has_unfinished_requests() else ():
            ticket, new = int(output.request_id), output.outputs[0]
            if new.token_ids:
                tickets += [ticket] * len(new.token_ids)
                tokens += new.token_ids
                logprobs += new.logprobs.logprobs
            if new.token_ids or output.finished:
                self._unprefilled.pop(ticket, None)
            if output.finished:
                ended.append(ticket)
                reasons.append(new.finish_reason or "error")
        return {
            "op": "stepped",
            "version": self._version,
            "tickets": np.array(tickets, "<i8").tobytes(),
            "tokens": np.array(tokens, "<i4").tobytes(),
            "logprobs": np.array(logprobs, "<f4").tobytes(),
            "ended": ended,
            "reasons": reasons,
        }

    def update(self, version: int, weights: dict[str, Any]) -> dict[str, Any]:
        """Take the weights of `version`; tokens from the next step on are drawn from them.

        Prefixes computed before are not shared with rollouts that start later: their salt differs.
        Rollouts whose prompt is still to be computed get the new salt. `recompute` has vLLM compute
        all prefixes again.
        """
        information = {key: value for key, value in weights.items() if key != "handles"}
        if "handles" in weights:
            information["ipc_handles"] = [
                {gpu: unpack_handle(packed) for gpu, packed in handle.items()}
                for handle in weights["handles"]
            ]
        self._engine.collective_rpc("start_weight_update")
        self._engine.collective_rpc("update_weights", kwargs={"update_info": information})
        self._engine.collective_rpc("finish_weight_update")
        self._engine.set_weight_version(str(version))
        self._version = version
        self._updates += 1
        self._engine.abort_request([str(ticket) for ticket in self._unprefilled])
        for ticket in self._unprefilled:
            self._add(ticket)
        if self._recomputes:
            self._engine.reset_prefix_cache(reset_running_requests=True)
        return {"op": "updated", "version": version}

    def cache_tokens(self) -> int:
        """Positions that vLLM's KV-cache holds."""
        config = self._engine.vllm_config.cache_config
        return int(config.num_gpu_blocks * config.block_size)

    def _add(self, ticket: int) -> None:
        from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found,unused-ignore]

        start = self._unprefilled[ticket]
        self._engine.add_request(
            str(ticket),
            {
                "prompt_token_ids": np.frombuffer(start["prompt"], "<i4").tolist(),
                "cache_salt": str(self._updates),
            },
            SamplingParams(
                **start["sampling"],
                seed=start["seed"] & (2**63 - 1),
                max_tokens=start["most"],
                stop_token_ids=start["ends"],
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                flat_logprobs=True,
                output_kind=RequestOutputKind.DELTA,
            ),
        )


def cache_room(config: Any, slots: int, context: int, budget: int) -> int:
    """Bytes of keys and values of `slots` full rows, each in whole pages, and vLLM's own empty
    page; of fewer rows, at least one, where these would exceed the budget in bytes.
    """
    model, parallel = config.model_config, config.parallel_config
    heads, layers = model.get_num_kv_heads(parallel), model.get_num_layers(parallel)
    page = config.cache_config.block_size
    page_bytes = int(2 * layers * heads * model.get_head_size() * model.dtype.itemsize * page)
    row_bytes: int = page_bytes * -(-context // page)
    return max(1, min(slots, budget // row_bytes)) * row_bytes + page_bytes


def receive(connection: ServerStream, parent: int) -> dict[str, Any]:
    """The next request, however long it takes. Raises ConnectionError when the parent is gone."""
    while True:
        try:
            return connection.receive(LOOK_S)
        except TimeoutError:
            if os.getppid() != parent:
                raise ConnectionError("the parent has died") from None


def serve(connection: ServerStream, parent: int) -> None:
    """Answer requests. Raises ConnectionError at the end of the stream."""
    server = Server(receive(connection, parent))
    ready = {"op": "ready", "vllm": sys.modules["vllm"].__version__, "platform": server.platform}
    connection.send({**ready, "cache_tokens": server.cache_tokens()}, SEND_S)
    answers: dict[str, Callable[..., dict[str, Any]]]
    answers = {"step": server.step, "update": server.update}
    while True:
        request = receive(connection, parent)
        connection.send(answers[request.pop("op")](**request), SEND_S)


def main() -> int:
    """Serve on the socket whose number is the first argument; the exit code."""
    connection = ServerStream(socket.socket(fileno=int(sys.argv[1])))
    try:
        serve(connection, os.getppid())
    except ConnectionError:
        return 0
    except Exception as error:
        traceback.print_exc()
        connection.send({"op": "failed", "error": f"{type(error).__name__}: {error}"}, SEND_S)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
