"""Where the link is slow, ranks that have the version before get what changed, bit for bit; all
others everything.
"""

from functools import partial

import pytest
import torch
from msgspec import structs

from transport.weights import Layout, Mesh, ShardedWriter, WeightError
from transport.weights.protocol.messages import CODEC, FormGroup
from transport.weights.sharded import writer
from transport.weights.sharded.delta import Delta, Patch

from ..sharded_rig import FAST, Group, Trainer, shards, until

SLOW = 1e7


"""Bytes per second."""


SLOWLY = partial(ShardedWriter, link_bytes_per_s=SLOW)


MODEL = {
    "embed": ((257, 33), "float32"),
    "q": ((96, 64), "float32"),
    "k": ((32, 64), "float32"),
    "out": ((64, 96), "bfloat16"),
    "norm": ((13,), "float32"),
    "steps": ((3,), "int64"),
}


CUTS = {"embed": 0, "q": 0, "k": 0, "out": 1}


SOURCE = Layout.fsdp(MODEL, 2)


TARGET = Layout.cut(MODEL, Mesh.of(2), lambda name: (CUTS.get(name),)).fused("qk", ["q", "k"])


BUCKET = 8192


class Weights:
    """A model that changes a little in each version: any bits, among them those of NaN and -0."""

    def __init__(self, layout: Layout) -> None:
        self._draw = torch.Generator().manual_seed(7)
        self._bytes = {
            name: torch.randint(
                0, 256, (self._size(held),), dtype=torch.uint8, generator=self._draw
            )
            for name, held in layout.tensors.items()
        }
        self._layout = layout

    @staticmethod
    def _size(held) -> int:
        return torch.Size(held.shape).numel() * getattr(torch, held.dtype).itemsize

    def change(self, share: float) -> None:
        """Other bits in about that share of the 16-bit words."""
        for data in self._bytes.values():
            words = data.view(torch.int16)
            hit = torch.rand(len(words), generator=self._draw) < share
            words[hit] ^= torch.randint(1, 1 << 15, (int(hit.sum()),), generator=self._draw).to(
                torch.int16
            )

    @property
    def full(self) -> dict[str, torch.Tensor]:
        return {
            name: data.clone().view(getattr(torch, held.dtype)).view(held.shape)
            for (name, held), data in zip(
                self._layout.tensors.items(), self._bytes.values(), strict=True
            )
        }


class Run:
    """A trainer over a slow link, and what it publishes."""

    def __init__(self, address: str, source: Layout = SOURCE, kind=SLOWLY, **knobs) -> None:
        self.source, self.weights = source, Weights(source)
        self.trainer = Trainer(source, address, kind, bucket_bytes=BUCKET, **knobs)
        self.full = sum(
            torch.Size(h.shape).numel() * getattr(torch, h.dtype).itemsize
            for h in source.tensors.values()
        )

    def publish(self, version: int, share: float = 0.01) -> dict[str, torch.Tensor]:
        """The tensors of a version in which this share of the words changed."""
        self.weights.change(share)
        tensors = self.weights.full
        for rank, end in enumerate(self.trainer.writers):
            end.publish(version, shards(self.source, rank, tensors))
        return tensors

    def give(self, version: int, *groups: Group, share: float = 0.01) -> None:
        """Publish it, and see that each rank of the groups gets the bytes of its own boxes."""
        tensors = self.publish(version, share)
        until(lambda: all(group.versions == {version} for group in groups), self.trainer, *groups)
        for group in groups:
            assert_bits(group, tensors)

    def sent(self, group: str = "generator-0") -> int:
        """Bytes sent by all ranks since the last call, once all of them have counted."""
        until(lambda: all(not each._member.kept for each in self.trainer.writers))
        total = sum(each.sent_bytes.get(group, 0) for each in self.trainer.writers)
        seen = self.__dict__.setdefault("seen", {})
        before, seen[group] = seen.get(group, 0), total
        return total - before


def assert_bits(group: Group, tensors: dict[str, torch.Tensor]) -> None:
    for rank, mine in enumerate(group.tensors):
        for name, wanted in shards(group.layout, rank, tensors).items():
            found = mine[name].detach()
            assert torch.equal(
                found.contiguous().view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)
            ), name


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/w"


@pytest.fixture
def run(address):
    run = Run(address)
    yield run
    run.trainer.close()


@pytest.fixture
def group(run, address):
    group = Group(TARGET, address)
    yield group
    group.close()


@pytest.mark.parametrize("adopt", ["view", "copy"])
def test_every_rank_gets_every_bit_of_ten_versions_for_a_fraction_of_the_bytes(run, address, adopt):
    group = Group(TARGET, address, adopt=adopt)
    run.give(1, group)
    assert run.sent() >= run.full
    for version in range(2, 11):
        run.give(version, group)
        assert 0 < run.sent() < run.full / 5
    group.close()


def test_without_a_link_speed_every_version_is_sent_in_full(address):
    run, group = Run(address, kind=ShardedWriter), Group(TARGET, address)
    run.give(1, group)
    whole = run.sent()
    for version in (2, 3):
        run.give(version, group)
        assert run.sent() == whole
    group.close()
    run.trainer.close()


def test_where_everything_changed_everything_is_sent(run, group):
    run.give(1, group)
    whole = run.sent()
    run.give(2, group, share=1.0)
    assert run.sent() == whole
    run.give(3, group)
    assert run.sent() < whole / 5


def test_a_late_group_gets_all_at_first_and_deltas_from_then_on(run, group, address):
    for version in (1, 2, 3):
        run.give(version, group)
    late = Group(TARGET, address, "generator-1")
    until(lambda: late.versions == {3}, late)
    whole = run.sent("generator-1")
    assert whole >= run.full
    for version in (4, 5):
        run.give(version, group, late)
        assert run.sent("generator-1") < whole / 5
    late.close()


def test_a_group_whose_version_is_not_at_hand_any_more_gets_all(run, group):
    run.give(1, group)
    whole = run.sent()
    run.publish(2)
    until(lambda: all(reader.poll() for reader in group.readers))
    assert run.sent() < whole / 5
    tensors = [run.publish(version) for version in (3, 4)][-1]
    assert all(each._staging.versions() == {3, 4} for each in run.trainer.writers)
    until(lambda: run.trainer.writers[0]._coordinator.newest == 4)
    until(lambda: group.versions == {4}, group)
    assert_bits(group, tensors)
    assert run.sent() == whole
    run.give(5, group)
    assert run.sent() < whole / 5


def test_a_reader_that_comes_back_gets_all_again(run, group):
    run.give(1, group)
    whole = run.sent()
    with group.readers[1]._control.changed:
        epoch = group.readers[1].epoch
        group.readers[1]._control.act([group.readers[1]._member.leaving()])
    until(lambda: all(reader.epoch > epoch for reader in group.readers))
    run.give(2, group)
    assert run.sent() == whole
    run.give(3, group)
    assert run.sent() < whole / 5


def test_a_damaged_delta_is_refused_the_old_version_kept_and_the_next_one_taken(
    run, group, monkeypatch
):
    before = run.publish(1)
    until(lambda: group.versions == {1}, group)
    to_bytes, flipped = Delta.to_bytes, []

    def flip_once(delta):
        message = to_bytes(delta)
        if not flipped:
            flipped.append(len(message) // 2)
            message[flipped[0]] ^= 16
        return message

    monkeypatch.setattr(Delta, "to_bytes", flip_once)
    run.publish(2)
    until(
        lambda: any("other bytes than were sent in" in reader.refused for reader in group.readers),
        group,
    )
    assert flipped and group.versions == {1}
    assert_bits(group, before)
    for version in (3, 4):
        run.give(version, group)
    assert not run.trainer.writers[0].faults


def test_a_byte_flipped_where_a_delta_has_been_put_together_is_found(run, group, monkeypatch):
    run.give(1, group)
    unpack, flipped = Patch.unpack, []

    def flip_once(patch, sums):
        if not flipped:
            pack = patch._step.unpack

            def damaged(sums):
                flipped.append(patch._step.data[0].bitwise_xor_(1))
                return pack(sums)

            patch._step.unpack = damaged
        try:
            return unpack(patch, sums)
        finally:
            patch._step.__dict__.pop("unpack", None)

    monkeypatch.setattr(Patch, "unpack", flip_once)
    run.publish(2)
    until(lambda: any(reader.refused for reader in group.readers), group)
    assert flipped and group.versions == {1}
    run.give(3, group)


def test_a_damaged_delta_is_refused_even_where_nothing_is_left_but_zeros(address, monkeypatch):
    layout = Layout.whole({"a": ((4096,), "float32")})
    trainer, group = Trainer(layout, address, SLOWLY), Group(layout, address)
    values = torch.zeros(4096)
    values[::512] = 1.0
    trainer.writers[0].publish(1, {"a": values})
    until(lambda: group.versions == {1}, group)
    to_bytes = Delta.to_bytes
    monkeypatch.setattr(Delta, "to_bytes", lambda delta: to_bytes(delta).bitwise_xor_(1))
    trainer.writers[0].publish(2, {"a": torch.zeros(4096)})
    until(lambda: group.readers[0].refused, group)
    assert torch.equal(group.tensors[0]["a"].detach(), values)
    group.close()
    trainer.close()


def test_weights_that_their_owner_changes_are_no_base_and_from_then_on_all_is_sent(run, group):
    run.give(1, group)
    spoil(group)
    run.publish(2)
    until(lambda: any(reader.refused for reader in group.readers), group)
    for version in (3, 4, 5):
        run.give(version, group)
        spoil(group)
    assert not run.trainer.writers[0].faults


def spoil(group: Group) -> None:
    with torch.no_grad():
        group.tensors[0]["qk"].add_(1.0)


def test_a_version_that_is_cast_by_its_sender_has_deltas_and_one_cast_by_its_receiver_has_none(
    address,
):
    source = SOURCE.cast("float32")
    run = Run(address, source)
    down, up = (
        Group(TARGET.cast("bfloat16"), address, "down"),
        Group(TARGET.cast("float64"), address, "up"),
    )
    for version in (1, 2, 3):
        tensors = run.publish(version)
        until(
            lambda version=version: down.versions == up.versions == {version}, run.trainer, down, up
        )
        assert_numbers(down, tensors)
        assert_numbers(up, tensors)
        downs, ups = run.sent("down"), run.sent("up")
        if version == 1:
            first = downs, ups
        else:
            assert downs < first[0] / 5 and ups == first[1]
    for each in (down, up):
        each.close()
    run.trainer.close()


def assert_numbers(group: Group, tensors: dict[str, torch.Tensor]) -> None:
    """As `assert_bits`, where a cast may change the bits of a NaN."""
    for rank, mine in enumerate(group.tensors):
        for name, wanted in shards(group.layout, rank, tensors).items():
            assert torch.equal(mine[name].detach().nan_to_num(7.0), wanted.nan_to_num(7.0)), name


def test_a_version_stays_while_deltas_on_it_are_made_and_a_newer_one_waits(address, monkeypatch):
    run, group = Run(address, Layout.whole(MODEL)), Group(TARGET, address)
    run.give(1, group)
    made, published = writer.changes, []

    def publish_meanwhile(*arguments):
        found = made(*arguments)
        if not published:
            published.append(run.trainer.writers[0].publish(3, run.weights.full))
        return found

    monkeypatch.setattr(writer, "changes", publish_meanwhile)
    tensors = run.publish(2)
    until(lambda: group.versions == {2}, group)
    assert published == [False] and run.trainer.writers[0].pending == 3
    assert_bits(group, tensors)
    until(lambda: group.versions == {3}, run.trainer, group)
    group.close()
    run.trainer.close()


def test_borrowed_tensors_have_no_deltas(address):
    with pytest.raises(WeightError, match="take hold='snapshot'"):
        Trainer(SOURCE, address, SLOWLY, hold="until_settle", deadlines=FAST)


def test_both_ends_are_told_whether_there_are_deltas():
    form = FormGroup(
        epoch=1, sources=1, readers=[], layouts=[], store="s", backend="gloo", bucket_bytes=1
    )
    assert not form.deltas
    assert CODEC.decode(CODEC.encode(structs.replace(form, deltas=True))).deltas
