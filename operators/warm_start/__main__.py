"""The child process of a warm start: trains the policy that a work folder asks for and saves it
there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

from dataflow.errors import GraphError
from dataflow.system.messages import Channel
from operators.warm_start.launch import BAD_INPUT, CODEC, RECORD_FILE, Progress, WarmStartSpec

ORPHANED = 3
"""Exit status of a process whose parent is gone."""
SEND_S = 30.0
"""For the parent to take what the process tells of its progress."""


def die_with_parent(channel: Channel[Progress]) -> None:
    """End this process as soon as the parent's end of the channel is closed, which its death does
    too.
    """

    def watch() -> None:
        channel.readable(None)
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True).start()


def make_policy(work: Path, channel: Channel[Progress] | None) -> None:
    """Train the policy of `work`/spec.json on `work`/examples.jsonl and save it as
    `work`/policy.
    """
    import torch

    from operators.warm_start.train import character_tokenizer, small_llama, train

    spec = WarmStartSpec(**json.loads((work / "spec.json").read_text("utf-8")))
    with (work / "examples.jsonl").open(encoding="utf-8") as lines:
        examples = [(pair[0], pair[1]) for pair in map(json.loads, lines)]
    torch.set_num_threads(spec.threads)
    torch.use_deterministic_algorithms(True)
    tokenizer = character_tokenizer(spec.alphabet, spec.max_positions)
    model = small_llama(spec, tokenizer)
    started = time.monotonic()

    def report(step: int, loss: float) -> None:
        if channel is not None:
            channel.send(Progress(step, loss))

    loss = train(model, tokenizer, examples, spec, report)
    policy = work / "policy"
    model.save_pretrained(policy)
    tokenizer.save_pretrained(policy)
    record = {
        "fingerprint": spec.fingerprint,
        "spec": dataclasses.asdict(spec),
        "parameters": sum(p.numel() for p in model.parameters()),
        "examples": len(examples),
        "loss": loss,
        "seconds": round(time.monotonic() - started, 3),
        "torch": torch.__version__,
    }
    (policy / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def main() -> int:
    """Run one warm start; a fault of the input is one line on stderr and exit status BAD_INPUT."""
    parser = argparse.ArgumentParser(prog="python -m operators.warm_start", description=__doc__)
    parser.add_argument(
        "work", type=Path, help="folder with spec.json and examples.jsonl; gets policy/"
    )
    parser.add_argument(
        "--parent", type=int, help="number of the socket that takes its progress; ends when it does"
    )
    arguments = parser.parse_args()
    channel = None
    if arguments.parent is not None:
        channel = Channel(socket.socket(fileno=arguments.parent), CODEC, SEND_S)
        die_with_parent(channel)
    try:
        make_policy(arguments.work, channel)
    except GraphError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
