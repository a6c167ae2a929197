"""What a plan takes over links of given bandwidths, and how it is told and pictured."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.weights.costs.explain import (
    MOST,
    Interconnect,
    amount,
    cost,
    explain,
    picture,
)
from transport.weights.layout.layout import Layout, Mesh
from transport.weights.layout.reshard import reshard

GB = 10**9


LINKS = Interconnect(
    gpus_per_node=2, within_bytes_per_s=100 * GB, between_bytes_per_s=10 * GB, message_s=0.0
)


tables = st.tuples(st.integers(1, 6), st.integers(1, 6)).flatmap(
    lambda shape: st.lists(
        st.integers(0, 10**12), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]
    ).map(lambda flat: np.array(flat, np.int64).reshape(shape))
)


def test_the_busiest_rank_sets_the_pace():
    made = cost(np.array([[30 * GB, 10 * GB], [0, 20 * GB]]), LINKS)
    assert made.seconds == pytest.approx(4.0)
    assert made.busiest == "source rank 0 sends 40 GB between nodes in 598 messages"
    assert made.source_bytes.tolist() == [[0, 0, 40 * GB], [0, 0, 20 * GB]]
    assert made.destination_bytes.tolist() == [[0, 0, 30 * GB], [0, 0, 30 * GB]]
    received = cost(np.array([[30 * GB, 0], [20 * GB, 0]]), LINKS)
    assert received.seconds == pytest.approx(5.0)
    assert received.busiest.startswith("destination rank 0 receives 50 GB between nodes")


def test_the_link_is_chosen_by_where_the_ranks_sit():
    table = np.array([[GB, GB, GB]])
    together = cost(table, Interconnect(gpus_per_node=2, destination_first=0))
    assert together.link_bytes == {"local": GB, "within": GB, "between": GB}
    assert cost(table, Interconnect(gpus_per_node=2)).link_bytes == {
        "local": 0,
        "within": 0,
        "between": 3 * GB,
    }
    assert (
        cost(table, Interconnect(gpus_per_node=8, destination_first=1)).link_bytes["within"]
        == 3 * GB
    )


def test_links_work_at_the_same_time():
    links = Interconnect(
        gpus_per_node=2,
        within_bytes_per_s=GB,
        between_bytes_per_s=GB,
        message_s=0,
        destination_first=1,
    )
    assert cost(np.array([[GB, GB]]), links).seconds == pytest.approx(1.0)


def test_every_bucket_costs_a_message_at_both_ends():
    links = Interconnect(message_s=1.0, bucket_bytes=100, between_bytes_per_s=1e18)
    made = cost(np.array([[250, 100], [0, 1]]), links)
    assert made.source_messages.tolist() == [4, 1]
    assert made.destination_messages.tolist() == [3, 2]
    assert made.seconds == pytest.approx(4.0)


@given(tables)
def test_bytes_are_neither_lost_nor_made_between_the_sides(table):
    made = cost(table, LINKS)
    assert made.source_bytes.sum(axis=1).tolist() == table.sum(axis=1).tolist()
    assert made.destination_bytes.sum(axis=1).tolist() == table.sum(axis=0).tolist()
    assert made.source_bytes.sum(axis=0).tolist() == made.destination_bytes.sum(axis=0).tolist()
    assert sum(made.link_bytes.values()) == table.sum()
    assert (
        made.seconds * LINKS.between_bytes_per_s
        >= max(table.sum(axis=0).max(), table.sum(axis=1).max()) * 0.999
    )


def test_slower_links_cost_more_and_nothing_costs_nothing():
    assert cost(np.zeros((2, 2), np.int64), LINKS).seconds == 0
    table = np.full((4, 4), GB)
    half = Interconnect(gpus_per_node=2, between_bytes_per_s=5 * GB, message_s=0)
    assert cost(table, half).seconds == pytest.approx(2 * cost(table, LINKS).seconds)


def test_links_without_bandwidth_are_refused():
    with pytest.raises(
        ValueError, match=r"links need bandwidths.* above zero; found .*; give bytes per second"
    ):
        Interconnect(between_bytes_per_s=0)


def example():
    tensors = {"a": ((8, 4), "float32"), "b": ((8, 4), "float32"), "norm": ((4,), "float32")}
    destination = Layout.cut(tensors, Mesh.of(2), lambda name: (None if name == "norm" else 1,))
    return reshard(Layout.fsdp(tensors, 4), destination)


def test_a_plan_explains_who_sends_what():
    text = explain(example(), Interconnect())
    assert text.splitlines()[:3] == [
        "288 B from 4 to 2 ranks, 24 copies between 8 of 8 pairs",
        "each source rank sends 72 B in 6 copies, with 2 peers",
        "each destination rank receives 144 B in 12 copies, with 4 peers",
    ]
    assert re.search(
        r"at least \S+ s by the model: .* \(0 B local, 0 B within, 288 B between\)", text
    )
    assert "  a [8, 4] float32 and 1 like it: 8 copies each" in text
    assert "  norm [4] float32: 8 copies each" in text
    assert text.splitlines()[-4:] == [f"        {rank}  36 B  36 B" for rank in range(4)]
    assert "by the model" not in explain(example())


def test_amounts_have_three_figures():
    assert [amount(n) for n in (0, 999, 1000, 1234567, 999_600, 5e15)] == [
        "0 B",
        "999 B",
        "1 KB",
        "1.23 MB",
        "1 MB",
        "5 PB",
    ]


@pytest.mark.parametrize(
    ("shape", "rows", "columns"), [((1, 1), 1, 1), ((4, 4), 4, 4), ((3, 64), 3, 64)]
)
def test_a_few_ranks_have_a_cell_for_each_pair(shape, rows, columns):
    found = ElementTree.fromstring(picture(np.arange(1, 1 + rows * columns).reshape(shape)))
    cells = [each for each in found.iter() if each.get("class") == "cell"]
    assert len(cells) == rows * columns
    assert len({each.get("x") for each in cells}) == columns
    assert cells[-1][0].text == f"rank {rows - 1} to rank {columns - 1}: {amount(rows * columns)}"


def test_many_ranks_are_pictured_node_by_node():
    made = picture(np.ones((512, 1000), np.int64), gpus_per_node=8)
    cells = [each for each in ElementTree.fromstring(made).iter() if each.get("class") == "cell"]
    assert len(cells) == 64 * -(-1000 // 16)
    assert cells[0][0].text == "ranks 0 to 7 to ranks 0 to 15: 128 B"
    assert cells[-1][0].text == "ranks 504 to 511 to ranks 992 to 999: 64 B"
    odd = ElementTree.fromstring(picture(np.ones((MOST + 1, 1), np.int64)))
    assert sum(each.get("class") == "cell" for each in odd.iter()) == 33


def test_a_picture_leaves_out_who_sends_nothing():
    found = ElementTree.fromstring(picture(example().pair_bytes, Interconnect().gpus_per_node))
    assert sum(each.get("class") == "cell" for each in found.iter()) == 8
    found = ElementTree.fromstring(picture(np.array([[5, 0], [0, 5]])))
    assert sum(each.get("class") == "cell" for each in found.iter()) == 2
