"""What vLLM's process is started with, and what travels to it and back."""

from __future__ import annotations

import numpy as np
import pytest

from dataflow.limits import Limits
from dataflow.system.messages import MessageError
from dataflow.weight_ends import WeightSite
from operators.engine.vllm.messages import CODEC, Adapters, Offered, Open, Start, Step, Stepped
from operators.engine.vllm.process import environment_of

OPEN = Open(
    model="/m",
    dtype="float32",
    trust_remote_code=False,
    slots=2,
    context_tokens=8,
    prefill_tokens=16,
    ranks=2,
    cache_bytes=None,
    cache_budget=1,
    page_tokens=None,
    recomputes=False,
    arguments={"quantization": "fp8", "seed": 3},
    shapes={"a.weight": (3, 5), "b": ()},
    adapters=Adapters(layers={"a": ("a.weight", "b", 0.5)}, room=8, start=None),
    site=WeightSite(
        executor="gloo",
        is_sharded=True,
        address="tcp://h:1",
        folder="/f",
        host="h",
        keys={"key": b"\x00s"},
    ),
    attempt=3,
    limits=Limits(transfer_s=7.0),
)


def test_messages_arrive_as_they_were_sent():
    start = Start(
        prompt=np.array([1, 2], np.int32),
        most=3,
        tickets=(5,),
        seeds=(-(1 << 63),),
        sampling={"temperature": 0.5, "top_k": 3},
        ends=(1,),
    )
    (found,) = CODEC.decode(CODEC.encode(Step(starts=(start,), aborts=(4,)))).starts
    assert found.prompt.tolist() == [1, 2] and (found.seeds, found.sampling) == (
        start.seeds,
        start.sampling,
    )
    assert CODEC.decode(CODEC.encode(OPEN)) == OPEN
    stepped = Stepped(
        version=4,
        tickets=np.array([5], np.int64),
        tokens=np.array([9], np.int32),
        logprobs=np.array([-0.1], np.float32),
        ended=(5,),
        reasons=("stop",),
        offered=Offered(version=6, note={"dropped": 2}),
    )
    again = CODEC.decode(CODEC.encode(stepped))
    assert again.logprobs.dtype == np.float32 and again.logprobs[0] == stepped.logprobs[0]
    assert (again.ended, again.reasons, again.offered) == ((5,), ("stop",), stepped.offered)


def test_a_log_shows_no_key_of_the_run():
    assert "key" not in repr(OPEN)


def test_what_is_no_message_is_refused():
    with pytest.raises(MessageError, match="vllm"):
        CODEC.decode(b"vllm/1\x80")


def test_the_process_gets_its_devices_and_none_of_our_module_path():
    base = {"PYTHONPATH": "/x", "CUDA_VISIBLE_DEVICES": "4,6,7", "A": "b"}
    found = environment_of("/e/bin/python", 3, "cuda:1", base, ranks=2)
    assert found["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert found["OMP_NUM_THREADS"] == "3" and found["A"] == "b" and "PYTHONPATH" not in found
    assert environment_of("/e/bin/python", 1, "cuda", {})["CUDA_VISIBLE_DEVICES"] == "0"
    assert environment_of("/e/bin/python", 1, "cuda:2", {}, 2)["CUDA_VISIBLE_DEVICES"] == "2,3"
