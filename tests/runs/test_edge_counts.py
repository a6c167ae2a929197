"""Whole runs whose edges are counted at both ends: the counts agree, and stand where people
look.
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from rigs.graphs import fake_graph, tiny_graph
from rigs.sent import agree

from dataflow import Run, RunError, inline, run
from dataflow.folder.run_folder import RunFolder
from dataflow.live.looks import Looks
from dataflow.worker.link import SchedulerLink
from dataflow.worker.messages import Bye, FromWorker
from dataflow.worker.worker import Worker

pytestmark = [pytest.mark.usefixtures("machine", "one_core"), pytest.mark.timeout(180)]

PROMPTS, GROUP = 64, 4
"""Of a graph whose source ends: all has arrived, and is acknowledged, before its run is over."""
ROWS = {
    "prompts>generator:prompts": PROMPTS,
    "generator>reward:prompts": PROMPTS * GROUP,
    "reward>trainer:prompts": PROMPTS * GROUP,
}


@pytest.mark.parametrize("on", ["processes", "inline"])
def test_both_ends_of_every_edge_count_the_same_over_a_whole_run(
    on: str, light: None, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"on": inline()} if on == "inline" else {}
    result = run(fake_graph(count=PROMPTS), runs=tmp_path, quiet=True, **how)
    assert result.verdict.clean
    found = agree(result.folder)
    assert {edge: ends["received"][1] for edge, ends in found.items()} == ROWS
    assert all(
        ends["sent"] == ends["received"] == ends["acknowledged"] for ends in found.values()
    ), found
    table = Run(result.folder).edges()
    assert (
        dict(zip(table["edge"].to_pylist(), table["received_rows"].to_pylist(), strict=True))
        == ROWS
    )
    assert pc.min(table["received_bytes"]).as_py() > 0
    edges = Looks(RunFolder.open(result.folder), over).look()["edges"]
    assert {
        f"{e['from']}>{e['to']}:{e['source']}": e["crossed"]["received"][1] for e in edges
    } == ROWS
    assert all(edge["rows_s"] > 0 and edge["bytes_s"] > 0 for edge in edges)


def test_what_workers_counted_counts_also_of_those_that_are_killed_before_they_say_so(
    light: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = SchedulerLink.send

    def killed(link: SchedulerLink, message: FromWorker) -> None:
        if isinstance(message, Bye):
            os.kill(os.getpid(), signal.SIGKILL)
        say(link, message)

    monkeypatch.setattr(SchedulerLink, "send", killed)
    monkeypatch.setattr(Worker, "crossed", property(lambda worker: {}))
    result = run(fake_graph(count=PROMPTS), runs=tmp_path, quiet=True)
    found = agree(result.folder)
    assert {edge: ends["acknowledged"][1] for edge, ends in found.items()} == ROWS


def over(folder: RunFolder, patience_s: float) -> Mapping[str, Any]:
    raise RunError("it is over")


def test_figures_of_a_run_s_weight_edge_and_of_both_parts_of_staleness_are_those_of_its_files(
    policy: Path, tmp_path: Path
) -> None:
    graph = tiny_graph(policy, max_staleness=2, max_tokens=24)
    result = run(graph, steps=6, runs=tmp_path, quiet=True)
    assert result.verdict.clean
    seen = Run(result.folder)
    names = ["step", "staleness", "staleness_generating", "staleness_waiting"]
    rows = seen.rollouts(columns=[*names, "new_logprobs", "logprobs", "error"])
    assert all(
        whole == one + other
        for whole, one, other in zip(*(rows[name].to_pylist() for name in names[1:]), strict=True)
    )
    for line in result.metrics:
        mine = rows.filter(pc.equal(rows["step"], line["step"]))
        for name in names[1:]:
            ages = mine[name].drop_null().to_pylist()
            assert (line[f"{name}_mean"], line[f"{name}_max"]) == (
                sum(ages) / len(ages),
                max(ages),
            ), name
    exchanges = [line for line in result.metrics if line["weights_sent"]]
    assert exchanges, "six steps, and the generator has taken weights of some"
    for line in exchanges:
        (sent,) = line["weights_sent"].values()
        assert (
            sent["version"] < line["step"]
            and 0 < sent["taken_seconds"] <= sent["committed_seconds"] < 60
        )
        assert sent["nbytes"] == sent["full_bytes"] == line["weights_moved_bytes"] > 0
    trained = rows.filter(pc.is_valid(rows["new_logprobs"]))
    assert (
        trained.num_rows
        and pc.all(
            pc.equal(
                pc.list_value_length(trained["new_logprobs"]),
                pc.list_value_length(trained["logprobs"]),
            )
        ).as_py()
    )
