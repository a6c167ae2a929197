"""Stands in for vLLM's process: speaks its protocol, draws tokens by a rule, dies or falls silent
on request.

A rollout with seed s draws the tokens s, s + 1, s + 2, ... (modulo the vocabulary); the
log-probability of each is minus the first number of the weights as they were at the last update.
RULES in the environment is a JSON object: die_at, silent_at, broken_at: the step at which it ends
with exit code 7, says nothing any more, or draws NaN. It imports no torch, so that it starts at
once.
"""

import json
import math
import mmap
import os
import socket
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[4] / "operators/engine/vllm"))

from wire import ServerStream

VOCABULARY = 31


def first_number(weights):
    """The first number of the weights, in the memory that the parent writes to."""
    dtype, _, at = next(iter(weights["layout"].values()))
    assert dtype == "float32"
    memory = mmap.mmap(weights["file"], os.fstat(weights["file"]).st_size)
    return np.frombuffer(memory, "<f4", count=1, offset=at)


def main():
    rules = json.loads(os.environ.get("RULES", "{}"))
    connection = ServerStream(socket.socket(fileno=int(sys.argv[1])))
    opened = connection.receive(60)
    first = first_number(opened["weights"])
    number, version, steps, live = 1.0, 0, 0, {}
    connection.send(
        {"op": "ready", "platform": rules.get("platform", "cpu"), "vllm": "0", "cache_tokens": 0},
        60,
    )
    while True:
        request = connection.receive(3600)
        if request["op"] == "update":
            number, version = float(first[0]), request["version"]
            connection.send({"op": "updated", "version": version}, 60)
            continue
        steps += 1
        if steps == rules.get("die_at"):
            print("no memory left", flush=True)
            os._exit(7)
        if steps == rules.get("silent_at"):
            time.sleep(3600)
        for ticket in request["aborts"]:
            live.pop(ticket, None)
        for start in request["starts"]:
            for ticket, seed in zip(start["tickets"], start["seeds"], strict=True):
                live[ticket] = {"next": seed, "most": start["most"], "ends": start["ends"]}
        tickets, tokens, ended = list(live), [], {}
        for ticket, row in list(live.items()):
            token = row["next"] % VOCABULARY
            tokens.append(token)
            row["next"] += 1
            row["most"] -= 1
            if token in row["ends"] or not row["most"]:
                ended[ticket] = "stop" if token in row["ends"] else "length"
                del live[ticket]
        logprob = math.nan if steps == rules.get("broken_at") else -number
        answer = {
            "op": "stepped",
            "version": version,
            "tickets": np.array(tickets, "<i8").tobytes(),
            "tokens": np.array(tokens, "<i4").tobytes(),
            "logprobs": np.full(len(tokens), logprob, "<f4").tobytes(),
            "ended": list(ended),
            "reasons": list(ended.values()),
        }
        connection.send(answer, 60)


if __name__ == "__main__":
    try:
        main()
    except ConnectionError:
        sys.exit(0)
