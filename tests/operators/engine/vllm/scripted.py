"""Stands in for vLLM's process: speaks its protocol, draws tokens by a rule, dies or falls silent
on request.

A rollout with seed s draws the tokens s, s + 1, s + 2, ... (modulo the vocabulary), wherever its
prompt ends; the log-probability of each is minus one minus the version that it is drawn with.
RULES in the environment is a JSON object: die_at, silent_at, broken_at: the step at which it ends
with exit code 7, says nothing any more, or draws NaN; versions: what the trainer offers at a step.
It imports no torch, so that it starts at once.
"""

import json
import math
import os
import socket
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[4]))

from dataflow.system.messages import Channel
from operators.engine.vllm.messages import (
    CODEC,
    Listen,
    Offered,
    Ready,
    Stepped,
    Update,
    Updated,
)

VOCABULARY = 31


def main():
    rules = json.loads(os.environ.get("RULES", "{}"))
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), CODEC, 60.0)
    channel.receive(60.0)
    version, steps, live, offered = 0, 0, {}, Offered()
    channel.send(
        Ready(
            platform=rules.get("platform", "cpu"),
            vllm="0",
            cache_tokens=0,
            bytes_held=(),
            unseen=(),
        )
    )
    while True:
        request = channel.receive(3600.0)
        match request:
            case Listen():
                channel.send(offered)
                continue
            case Update():
                version, offered = max(version, offered.version), Offered()
                channel.send(Updated(version=version, seconds=0.25, offered=offered))
                continue
        steps += 1
        if steps == rules.get("die_at"):
            print("no memory left", flush=True)
            os._exit(7)
        if steps == rules.get("silent_at"):
            time.sleep(3600)
        if str(steps) in rules.get("versions", {}):
            offered = Offered(version=rules["versions"][str(steps)], note={"dropped": steps})
        for ticket in request.aborts:
            live.pop(ticket, None)
        for start in request.starts:
            for ticket, seed in zip(start.tickets, start.seeds, strict=True):
                live[ticket] = {"next": seed, "most": start.most, "ends": start.ends}
        tickets, tokens, ended = list(live), [], {}
        for ticket, row in list(live.items()):
            token = row["next"] % VOCABULARY
            tokens.append(token)
            row["next"] += 1
            row["most"] -= 1
            if token in row["ends"] or not row["most"]:
                ended[ticket] = "stop" if token in row["ends"] else "length"
                del live[ticket]
        logprob = math.nan if steps == rules.get("broken_at") else -1.0 - version
        answer = Stepped(
            version=version,
            tickets=np.array(tickets, np.int64),
            tokens=np.array(tokens, np.int32),
            logprobs=np.full(len(tokens), logprob, np.float32),
            ended=tuple(ended),
            reasons=tuple(ended.values()),
            offered=offered,
        )
        channel.send(answer)


if __name__ == "__main__":
    try:
        main()
    except (EOFError, ConnectionError):
        sys.exit(0)
