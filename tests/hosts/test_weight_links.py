"""Weights between two hosts whose link is cut for a while: what a reader has is whole, and the
newest comes after.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigs.hosts import Host

from transport.security import RunKeys

PROGRAM = "tests.transport.weights.host_programs"


def said(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"version": -1}
    return found


def reaches(file: Path, version: int, within_s: float = 60.0) -> dict[str, Any]:
    deadline = time.monotonic() + within_s
    while (found := said(file))["version"] < version:
        assert time.monotonic() < deadline, (version, found, said(file.with_name("trained")))
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_link_that_is_cut_for_a_while_leaves_a_reader_whole_and_brings_it_the_newest_later(
    give_hosts: Callable[..., list[Host]], tmp_path: Path
) -> None:
    """For less than the ends wait for each other, and for longer than ZeroMQ waits; their clocks
    are days apart.
    """
    one, other = give_hosts("a", "b", shared=[tmp_path])
    keys = {name: key.decode() for name, key in RunKeys.make().to_plain().items()}
    (tmp_path / "keys").write_text(json.dumps(keys))
    read, trained = tmp_path / "read", tmp_path / "trained"
    with (tmp_path / "log").open("w") as log:
        ends = [
            host.popen(
                [sys.executable, "-m", PROGRAM, what, tmp_path, host.address],
                stdout=log,
                stderr=log,
            )
            for host, what in ((one, "train"), (other, "read"))
        ]
        before = reaches(read, 3)
        assert before["listens"] == [other.address], "gloo listens at the host's own address alone"
        for cut_s in (1.0, 13.0):
            other.cut()
            began = said(trained)["version"]
            time.sleep(cut_s)
            assert said(trained)["version"] > began, "the trainer waits for nobody"
            held = said(read)
            assert held["values"] == [held["version"]], "no version is there by half"
            other.mend()
            mended, newest = time.monotonic(), said(trained)["version"]
            after = reaches(read, newest + 1)
            assert after["values"] == [after["version"]]
            print(f"cut for {cut_s:g} s: versions again {time.monotonic() - mended:.1f} s after")
        (tmp_path / "end").touch()
        assert [end.wait(30) for end in ends] == [0, 0], (tmp_path / "log").read_text()
