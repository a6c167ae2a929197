"""The contract of the weight plane, the same for every executor."""

from contextlib import closing

import pytest
import torch

from transport.weights import FlatLayout, Hub, WeightReader, WeightWriter, memory
from transport.weights import writer as writing

from ..conftest import PACE, parameters, values

pytestmark = pytest.mark.usefixtures("clean_shm")


LAYOUT = FlatLayout.of(parameters())


def state(writer, name="generator-0"):
    return next(status for status in writer.readers if status.name == name)


@pytest.mark.parametrize("adopt", ["view", "copy"])
def test_a_reader_gets_what_the_writer_published(place, adopt):
    mine = parameters()
    writer, reader = place.writer(LAYOUT), place.reader(attach=mine, adopt=adopt)
    for version in (1, 2, 3, 7):
        assert writer.publish(version, parameters(version))
        place.settle(writer, reader)
        assert reader.version == version
        assert values(mine) == {version}
    assert writer.segments == (2, 0)
    assert state(writer).version == 7
    assert state(writer).state == "committed"


def test_an_exchange_is_timed_by_the_writer_and_by_each_reader(place):
    writer = place.writer(LAYOUT)
    early, late = (
        place.reader("early", attach=parameters()),
        place.reader("late", attach=parameters()),
    )
    place.settle(writer, early, late)
    assert writer.sent == {}
    writer.publish(1, parameters(1))
    place.settle(writer, early, late, adopt=False)
    early.adopt()
    place.clock.now += 2.0
    place.settle(writer, early)
    place.clock.now += 1.0
    late.adopt()
    place.settle(writer)
    taken = {
        name: (sent.version, sent.taken_s, sent.committed_s) for name, sent in writer.sent.items()
    }
    assert taken == {"early": (1, 0.0, 2.0), "late": (1, 3.0, 3.0)}
    assert {sent.pair_bytes for sent in writer.sent.values()} == {((LAYOUT.nbytes,),)}
    assert {sent.whole_bytes for sent in writer.sent.values()} == {LAYOUT.nbytes}
    late.close()
    place.settle(writer, early)
    assert list(writer.sent) == ["early"], "of readers that are there"


def test_random_bytes_arrive_as_they_were(place):
    torch.manual_seed(0)
    theirs = {"a": torch.randn(1000, 3), "b": torch.randint(-128, 127, (77,), dtype=torch.int8)}
    theirs["c"] = torch.randint(-(2**60), 2**60, (5, 5))
    mine = {name: torch.zeros_like(tensor) for name, tensor in theirs.items()}
    writer, reader = (
        place.writer(FlatLayout.of(theirs), checksum="tensors"),
        place.reader(attach=mine),
    )
    writer.publish(1, theirs)
    place.settle(writer, reader)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64]
)
@pytest.mark.parametrize("adopt", ["view", "copy"])
def test_tensors_are_cast_on_the_way(place, dtype, adopt):
    mine = parameters(dtype=dtype)
    specs = [(t.name, t.shape, str(dtype).removeprefix("torch.")) for t in LAYOUT.tensors]
    writer, reader = place.writer(FlatLayout.build(specs)), place.reader(attach=mine, adopt=adopt)
    writer.publish(1, parameters(3.0))
    place.settle(writer, reader)
    assert values(mine) == {3.0}
    assert all(tensor.dtype == dtype for tensor in mine.values())


def test_a_parameter_of_another_dtype_than_the_layouts_is_copied_with_a_cast(place):
    mine = parameters(dtype=torch.float64)
    before = mine["up"].data_ptr()
    writer, reader = place.writer(LAYOUT), place.reader(attach=mine)
    writer.publish(1, parameters(3.0))
    place.settle(writer, reader)
    assert values(mine) == {3.0}
    assert mine["up"].dtype == torch.float64
    assert mine["up"].data_ptr() == before


@pytest.mark.parametrize("adopt", ["view", "copy"])
def test_strides_do_not_matter(place, adopt):
    theirs = {"w": torch.arange(12.0).view(3, 4).t()}
    mine = {"w": torch.nn.Parameter(torch.zeros(3, 4).t())}
    writer, reader = place.writer(FlatLayout.of(theirs)), place.reader(attach=mine, adopt=adopt)
    writer.publish(1, theirs)
    place.settle(writer, reader)
    assert torch.equal(mine["w"], theirs["w"])


def test_an_update_by_view_moves_a_pointer_and_copies_nothing(place):
    mine = parameters()
    writer, reader = place.writer(LAYOUT), place.reader(attach=mine, adopt="view")
    seen = []
    for version in range(1, 7):
        writer.publish(version, parameters(version))
        place.settle(writer, reader)
        seen.append(mine["up"].data_ptr())
    assert seen[0] != seen[1]
    assert seen == seen[:2] * 3


def test_an_update_by_copy_leaves_the_parameters_where_they_are(place):
    mine = parameters()
    before = {name: tensor.data_ptr() for name, tensor in mine.items()}
    writer, reader = place.writer(LAYOUT), place.reader(attach=mine, adopt="copy")
    for version in range(1, 4):
        writer.publish(version, parameters(version))
        place.settle(writer, reader)
    assert before == {name: tensor.data_ptr() for name, tensor in mine.items()}


def test_tied_tensors_travel_once_and_stay_tied(place):
    embed, head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
    head.weight = embed.weight
    both = {"embed.weight": embed.weight, "head.weight": head.weight}
    layout = FlatLayout.of(both)
    assert [spec.name for spec in layout.tensors] == ["embed.weight"]
    writer, reader = place.writer(layout), place.reader(attach=both)
    writer.publish(1, {"head.weight": torch.full((5, 4), 9.0)})
    place.settle(writer, reader)
    assert values(both) == {9.0}
    assert head.weight is embed.weight


def test_the_newest_version_wins_and_versions_nobody_took_are_skipped(place):
    mine = parameters()
    writer, reader = place.writer(LAYOUT), place.reader(attach=mine)
    writer.publish(1, parameters(1))
    place.settle(writer, reader)
    for version in range(2, 30):
        assert writer.publish(version, parameters(version))
    place.settle(reader, adopt=False)
    assert reader.poll().version == 29
    assert reader.adopt() == 29
    assert values(mine) == {29}
    assert writer.segments == (2, 0)


def test_a_version_with_no_free_segment_waits_and_is_written_when_one_frees(place):
    slow, fast = parameters(), parameters()
    writer = place.writer(LAYOUT)
    one, two = place.reader("slow", attach=slow), place.reader("fast", attach=fast)
    writer.publish(1, parameters(1))
    place.settle(writer, one, two)
    writer.publish(2, parameters(2))
    place.settle(writer, two)
    assert not writer.publish(3, parameters(3))
    assert not writer.publish(4, parameters(4))
    assert (writer.version, writer.pending) == (2, 4)
    assert (values(slow), values(fast)) == ({1}, {2})
    place.settle(one, writer, two)
    assert writer.pending is None
    assert (one.version, two.version) == (4, 4)
    assert writer.segments == (2, 0)


def test_a_late_joiner_gets_the_newest_version_and_the_note(place):
    writer = place.writer(LAYOUT)
    writer.tell({"dropped": 3})
    for version in range(1, 5):
        writer.publish(version, parameters(version))
    mine = parameters()
    reader = place.reader(attach=mine)
    place.settle(writer, reader)
    assert values(mine) == {4}
    assert reader.note == {"dropped": 3}


def test_a_reader_may_come_before_the_writer(place):
    mine = parameters()
    reader = place.reader(attach=mine)
    assert reader.poll() is None
    writer = place.writer(LAYOUT)
    writer.publish(1, parameters(1))
    place.clock.now += PACE.heartbeat_s
    place.settle(reader, writer)
    assert values(mine) == {1}


def test_a_note_reaches_every_reader_and_the_newest_one_stays(place):
    writer, one = place.writer(LAYOUT), place.reader("one", attach=parameters())
    place.settle(writer, one)
    writer.tell({"dropped": 1})
    writer.tell({"dropped": 2, "why": "stale", "share": 0.5})
    two = place.reader("two", attach=parameters())
    place.settle(writer, one, two)
    assert one.note == two.note == {"dropped": 2, "why": "stale", "share": 0.5}


def test_a_closed_reader_keeps_its_version_in_memory_of_its_own(place):
    mine = parameters()
    writer, reader = place.writer(LAYOUT), place.reader(attach=mine)
    writer.publish(1, parameters(1))
    place.settle(writer, reader)
    reader.close()
    place.settle(writer)
    assert writer.readers == ()
    for version in range(2, 6):
        assert writer.publish(version, parameters(version))
    assert values(mine) == {1}


def test_a_model_computes_with_adopted_views(place):
    model = torch.nn.Linear(8, 4)
    theirs = {"weight": torch.ones(4, 8), "bias": torch.zeros(4)}
    writer, reader = (
        place.writer(FlatLayout.of(theirs)),
        place.reader(attach=dict(model.named_parameters())),
    )
    writer.publish(1, theirs)
    place.settle(writer, reader)
    with torch.inference_mode():
        assert model(torch.ones(2, 8)).unique().tolist() == [8.0]


def test_in_one_process_a_waiting_reader_is_answered_though_nobody_polls_the_writer():
    hub, mine = Hub(), parameters()
    with closing(WeightWriter(LAYOUT, hub)) as writer, closing(WeightReader(hub, "r")) as reader:
        reader.attach(mine)
        writer.publish(3, parameters(3))
        assert reader.wait(3, timeout_s=5.0) == 3
        assert values(mine) == {3}


def test_copies_run_on_one_thread_and_leave_the_setting_alone(place, monkeypatch):
    seen = []

    def noted(does):
        return lambda *what: (seen.append(torch.get_num_threads()), does(*what))[1]

    monkeypatch.setattr(writing, "fill", noted(writing.fill))
    monkeypatch.setattr(memory, "copy", noted(memory.copy))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        writer, reader = place.writer(LAYOUT), place.reader(attach=parameters(), adopt="copy")
        writer.publish(1, parameters(1))
        place.settle(writer, reader)
        assert seen == [1, 1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
