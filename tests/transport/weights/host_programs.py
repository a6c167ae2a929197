"""The ends of a weight plane as programs, each on a host of its own: `python -m ... train|read
FOLDER ADDRESS`.

They find the run's keys and each other in a folder that both see, and say there how far they have
come.
"""

import json
import sys
import time
from pathlib import Path

import psutil
import torch

from transport.security import RunKeys
from transport.weights import Deadlines, Layout, ShardedReader, ShardedWriter
from transport.weights.sharded.control import CoordinatorSocket, NetworkEnd

MODEL = {f"t{n}": ((64, 64), "float32") for n in range(8)}
PACE = Deadlines(heartbeat_s=0.1, gone_s=2.0, form_s=10.0, ready_s=2.0, transfer_s=3.0)
LIMIT_S = 120.0


def main(what: str, folder: Path, address: str) -> None:
    torch.set_num_threads(1)
    keys = {name: key.encode() for name, key in json.loads((folder / "keys").read_text()).items()}
    host = NetworkEnd(address, RunKeys.from_plain(keys))
    layout, until = Layout.whole(MODEL), time.monotonic() + LIMIT_S
    if what == "train":
        listener = CoordinatorSocket(f"tcp://{address}:*", host.keys)
        writer = ShardedWriter(
            layout, 0, listener.address, deadlines=PACE, host=host, listener=listener
        )
        (folder / "line").write_text(listener.address)
        version = 0
        while time.monotonic() < until and not (folder / "end").exists():
            if version == 0 or not writer.pending:
                version += 1
                writer.publish(
                    version,
                    {name: torch.full(shape, float(version)) for name, (shape, _) in MODEL.items()},
                )
            writer.poll()
            say(
                folder / "trained",
                version=version,
                readers=len(writer.readers),
                faults=dict(writer.faults),
            )
            time.sleep(0.05)
        writer.close()
        return
    mine = {name: torch.nn.Parameter(torch.zeros(shape)) for name, (shape, _) in MODEL.items()}
    while not (folder / "line").exists():
        time.sleep(0.02)
    reader = ShardedReader(
        layout, 0, (folder / "line").read_text(), "reader", deadlines=PACE, host=host
    )
    reader.attach(mine)
    while time.monotonic() < until and not (folder / "end").exists():
        if reader.poll():
            reader.adopt()
        values = sorted(
            {
                float(value)
                for tensor in mine.values()
                for value in tensor.detach().flatten().unique()
            }
        )
        say(folder / "read", version=reader.version, values=values, listens=listening())
        time.sleep(0.02)
    reader.close()


def listening() -> list[str]:
    return sorted(
        {
            each.laddr.ip
            for each in psutil.Process().net_connections("tcp")
            if each.status == "LISTEN"
        }
    )


def say(file: Path, **facts: object) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(facts))
    draft.rename(file)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
