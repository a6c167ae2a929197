"""Where ends of a weight plane meet: in a host's private folder, or between hosts; and what becomes
of who moves.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.graphs import reward

from dataflow import Devices, Graph, Model
from dataflow.errors import RunError
from dataflow.planning.hosts import Host
from dataflow.planning.plan import Plan, plan
from dataflow.runtime import Context, WeightEnds
from dataflow.system.security import RunKeys
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.weight_ends import OpensWeights, WeightSite
from dataflow.worker.host import Settings
from dataflow.worker.messages import WeightLine
from dataflow.worker.weight_lines import WeightLines
from operators import Generator, Prompts, Trainer
from operators.credit import advantage
from operators.engine.build import arriving_bytes

KEYS = RunKeys.make().to_plain()


ADDRESSES = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}


Make = Callable[..., WeightLines]


@pytest.fixture
def make() -> Iterator[Make]:
    """The lines of one worker, on a host of the run."""
    graph, model = Graph("test"), Model("policy")
    generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    with ExitStack() as closing:
        folders = {
            host: closing.enter_context(tempfile.TemporaryDirectory(prefix="dataflow-"))
            for host in ADDRESSES
        }

        def made(node: str, host: str, trains_on: str = "c", **more: Any) -> WeightLines:
            place = {"generator": ("a", "b"), "trainer": trains_on}
            hosts = [Host(name=name, cpus=2) for name in ADDRESSES]
            planned = plan(graph, Devices.of(hosts), replicas={"generator": 2}, place=place)
            lines = WeightLines(
                graph,
                planned,
                [node],
                Settings(
                    folder="",
                    worker=node,
                    host=host,
                    sockets=folders[host],
                    listen=ADDRESSES[host],
                    keys=KEYS,
                    **more,
                ),
            )
            closing.callback(lines.close)
            return lines

        yield made


def test_a_trainer_listens_at_its_hosts_address_and_a_reader_there_and_elsewhere_finds_it(
    make: Make,
) -> None:
    trainer = make("trainer", "a", trains_on="a")
    line = trainer.own["trainer"]
    assert (line.host, sorted(line.at)) == ("a", ["gloo", "shared_memory"])
    assert line.at["gloo"].startswith("tcp://127.0.0.1:") and line.at["shared_memory"].startswith(
        "ipc://"
    )
    for host, replica, executor in (("a", 0, "shared_memory"), ("b", 1, "gloo")):
        reader = make("generator", host, trains_on="a", replica=replica)
        reader.read_from({"trainer": line})
        site = reader.site_of("trainer", "generator")
        assert (site.executor, site.address) == (executor, line.at[executor])
        assert bool(site.keys) == (executor == "gloo"), "keys go where they are needed alone"
        assert site.host == ("127.0.0.2" if executor == "gloo" else "")


def test_a_trainer_offers_what_a_reader_needs_that_is_started_again_on_another_host(
    make: Make,
) -> None:
    """All of its readers may have been planned beside it."""
    trainer = make("trainer", "a", trains_on="a")
    moved = make("generator", "c", trains_on="a", replica=0)
    moved.read_from(trainer.own)
    assert moved.site_of("trainer", "generator").executor == "gloo"


def test_a_reader_that_comes_to_be_beside_its_trainer_reads_what_that_offers(make: Make) -> None:
    trainer = make("trainer", "c")
    assert list(trainer.own["trainer"].at) == ["gloo"]
    beside = make("generator", "c", replica=0)
    beside.read_from(trainer.own)
    site = beside.site_of("trainer", "generator")
    assert (site.executor, site.host) == ("gloo", "127.0.0.3")


def test_a_trainer_listens_again_where_it_did_unless_that_is_taken_or_another_hosts(
    make: Make,
) -> None:
    first = make("trainer", "c")
    before = first.own["trainer"].at["gloo"]
    elsewhere = make("trainer", "c", at={"trainer.gloo": before}).own["trainer"].at["gloo"]
    assert elsewhere != before, "the port is taken"
    moved = make("trainer", "b", at={"trainer.gloo": before}).own["trainer"].at["gloo"]
    assert moved.startswith("tcp://127.0.0.2:")
    first.close()
    assert make("trainer", "c", at={"trainer.gloo": before}).own["trainer"].at["gloo"] == before


def test_every_rank_of_a_reader_finds_where_a_trainer_moved_to(make: Make) -> None:
    reader = make("generator", "b", replica=1)
    reader.read_from({"trainer": WeightLine(host="c", at={"gloo": "tcp://127.0.0.3:7000"})})
    site = reader.site_of("trainer", "generator")
    assert Path(site.where).read_text() == "tcp://127.0.0.3:7000"
    reader.read_from({"trainer": WeightLine(host="a", at={"gloo": "tcp://127.0.0.1:7000"})})
    assert Path(site.where).read_text() == "tcp://127.0.0.1:7000"
    written = [path.read_bytes() for path in Path(site.folder).iterdir()]
    assert not any(key in content for key in KEYS.values() for content in written), (
        "keys are written nowhere"
    )


def test_a_reader_whose_trainer_leaves_its_host_ends_to_be_started_again_and_says_so(
    make: Make,
) -> None:
    reader = make("generator", "a", trains_on="a", replica=0)
    reader.read_from(make("trainer", "a", trains_on="a").own)
    assert reader.site_of("trainer", "generator").executor == "shared_memory"
    with pytest.raises(
        RunError, match="were read by shared_memory, and now their trainer is on 'b'"
    ):
        reader.read_from(make("trainer", "b", trains_on="a").own)


def test_on_one_machine_ends_meet_in_its_private_folder_and_nobody_listens(
    make: Make, tmp_path: Path
) -> None:
    graph, model = Graph("test"), Model("policy")
    generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model)
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    for listen in ("", "127.0.0.1"):
        settings = Settings(
            folder="", sockets=str(tmp_path), listen=listen, keys=KEYS if listen else {}
        )
        lines = WeightLines(graph, plan(graph, Devices(cpus=2)), ["trainer"], settings)
        address = f"ipc://{tmp_path}/weights.trainer.shared_memory"
        assert lines.own == {"trainer": WeightLine(host="", at={"shared_memory": address})}
        assert not lines.listeners
        site = lines.site_of("trainer", "generator")
        assert not (site.host or site.keys or site.where)


@pytest.mark.parametrize(("arrives_in", "executor"), [(None, "cuda_ipc"), ("host", "nccl")])
def test_a_reader_that_receives_in_main_memory_takes_none_of_its_gpu_for_it(
    arrives_in: Any, executor: str, tmp_path: Path
) -> None:
    graph, model = Graph("test"), Model("policy")
    generator = Generator(model, arrives_in=arrives_in)
    trainer = Trainer(model, prompts_per_step=2)
    trainer(advantage(reward(generator(graph.source(Prompts([{"prompt": "a"}] * 4))))))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    made = plan(graph, Devices(cpus=8, gpus=4), gpus={"generator": 2, "trainer": 2})
    settings = Settings(folder="", sockets=str(tmp_path))
    lines = WeightLines(graph, made, ["generator"], settings)
    site = lines.site_of("trainer", "generator")
    assert (site.executor, site.in_host) == (executor, arrives_in == "host")
    assert not any(site.in_host for site in lines_of_trainer(graph, made, settings))
    opens = OpensWeights(lambda tensors, slices: None, site)  # type: ignore[arg-type, return-value]
    context = Context(node="generator", weights=WeightEnds(reader=opens))
    assert arriving_bytes(context, {"a": torch.zeros(8)}) == (0 if arrives_in else 32)


def lines_of_trainer(graph: Graph, made: Plan, settings: Settings) -> list[WeightSite]:
    return WeightLines(graph, made, ["trainer"], settings).sites_of("trainer", None)


@pytest.mark.parametrize(
    "wrong", [{"executor": "pigeons"}, {"host": "127.0.0.1"}, {"keys": {"a": b"b"}}]
)
def test_a_site_where_no_ends_can_meet_is_refused(wrong: dict[str, Any]) -> None:
    right = {"executor": "gloo", "is_sharded": True, "address": "ipc://a", "folder": "f"}
    assert "secret" not in repr(WeightSite(**right, host="a", keys={"all": b"secret"}))
    with pytest.raises(ValueError, match="cannot meet here.*; name one of"):
        WeightSite(**{**right, **wrong})
