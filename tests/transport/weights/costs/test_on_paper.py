"""A model too large for this machine, on paper: the sums are those of a closed form, and nothing
heavy is imported.
"""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from dataflow.planning.model_size import ModelSize
from transport.weights import LayoutMismatch
from transport.weights.costs.__main__ import main
from transport.weights.costs.decoder import NAMED, STYLES, Decoder
from transport.weights.costs.explain import Interconnect, in_rounds
from transport.weights.costs.on_paper import STATE, OnPaper, RankGrid, on_paper
from transport.weights.layout.layout import Layout, Mesh
from transport.weights.layout.parallel_plan import mesh_layout

WIDTH, INNER, KEYS, VOCABULARY, LAYERS = 16384, 53248, 1024, 128256, 126
REPLICAS, RANKS = 64, 8


@pytest.fixture(scope="module")
def large() -> OnPaper:
    """405 billion parameters: 512 ranks of a trainer, 64 replicas of 8 ranks in fp8."""
    return on_paper(
        NAMED["llama-405b"],
        RankGrid(shards=512),
        RankGrid(replicas=REPLICAS, tensor_parallel=RANKS),
        Interconnect(),
        quantized="fp8",
    )


def test_every_byte_that_a_reader_holds_is_sent_once(large):
    # rows of q, k, v, gate and up; o and down are cut by columns
    by_rows = WIDTH + 2 * KEYS + 2 * INNER
    values = LAYERS * (by_rows * WIDTH + WIDTH * (WIDTH + INNER))
    scales = 4 * LAYERS * (by_rows + RANKS * 2 * WIDTH)
    ends, norms = 2 * 2 * VOCABULARY * WIDTH, 2 * (2 * LAYERS + 1) * WIDTH
    replica = values + scales + ends + RANKS * norms
    assert large.plan.nbytes == REPLICAS * replica
    assert large.plan.pair_bytes.sum(axis=0).tolist() == large.plan.destination.rank_bytes.tolist()
    assert large.plan.destination.rank_bytes.tolist() == [replica // RANKS] * (REPLICAS * RANKS)


def test_a_trainer_s_rank_holds_its_share_and_sends_it_to_every_replica(large):
    trainer, _ = large.held.values()
    parameters = (
        LAYERS * (2 * WIDTH + 2 * KEYS + 3 * INNER + 2) * WIDTH + (2 * VOCABULARY + 1) * WIDTH
    )
    assert large.parameters == parameters
    assert {part: int(trainer[part].sum()) for part in STATE} == {
        part: each * parameters for part, each in STATE.items()
    }
    made, wide = (
        trainer["what is quantised to be sent"],
        [name for name in large.plan.source.tensors if "embed" in name],
    )
    assert wide and (made < large.plan.source.rank_bytes).all()
    sent, fair = large.plan.pair_bytes.sum(axis=1), large.plan.nbytes / 512
    assert sent.max() < 1.01 * fair, "rows are dealt out evenly, but for the last ranks"
    assert large.made.seconds == pytest.approx(sent.max() / 50e9, rel=0.02)


def test_its_rounds_take_hardly_longer_than_the_floor(large):
    rounds, seconds = in_rounds(large.plan.pair_bytes, large.links)
    assert rounds == 512, "as many as a reader's rank has senders"
    assert large.made.seconds <= seconds < 1.3 * large.made.seconds
    assert "\n512 rounds over one communicator, in each of which a rank has one peer at" in str(
        large
    )


def test_rounds_take_as_long_as_their_busiest_rank_where_none_waits():
    links = Interconnect(gpus_per_node=1, between_bytes_per_s=10.0, message_s=0.0)
    assert in_rounds(np.full((4, 1), 10), links) == (4, pytest.approx(4.0))
    assert in_rounds(np.full((4, 4), 10), links) == (4, pytest.approx(4.0)), "none waits"
    assert in_rounds(np.array([[10, 20], [30, 0]]), links) == (2, pytest.approx(4.0))
    assert in_rounds(np.zeros((2, 2), int), links) == (0, 0.0)


def test_what_a_trainer_s_parameter_takes_is_what_the_planner_says():
    assert ModelSize(parameters=1).parts("bfloat16", trains=True) == STATE


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_small_plan_is_filled_copy_by_copy(ranks):
    """What is summed above is what the copies themselves come to, at ranks that are replicas,
    shards and slices, of which several may hold the same key/value head.
    """
    small = Decoder(layers=2, width=16, inner=24, heads=4, kv_heads=2, vocabulary=29, head_width=4)
    made = on_paper(
        small,
        RankGrid(replicas=2, shards=3, tensor_parallel=ranks),
        RankGrid(replicas=2, tensor_parallel=ranks),
        Interconnect(),
        quantized="int8",
    )
    filled: dict[tuple[int, str], np.ndarray] = {}
    pairs = np.zeros_like(made.plan.pair_bytes)
    for copy in made.plan.copies():
        shape = made.plan.destination.local(copy.destination_rank)[copy.destination_name][0]
        into = filled.setdefault(
            (copy.destination_rank, copy.destination_name), np.zeros(shape, int)
        )
        into[copy.destination_box] += 1
        pairs[copy.source_rank, copy.destination_rank] += copy.nbytes
    assert all((times == 1).all() for times in filled.values())
    wanted = {
        (rank, name) for rank in range(2 * ranks) for name in made.plan.destination.local(rank)
    }
    assert filled.keys() == wanted
    assert pairs.tolist() == made.plan.pair_bytes.tolist()
    held = [
        sum(math.prod(s) * {"int8": 1, "bfloat16": 2, "float32": 4}[d] for s, d in local.values())
        for local in map(made.plan.destination.local, range(2 * ranks))
    ]
    assert made.plan.destination.rank_bytes.tolist() == held


def test_the_command_tells_it_without_torch():
    program = (
        "import sys; from transport.weights.costs.__main__ import main; "
        "status = main('--trainer 512 --generator 64x8 --precision fp8 --rank 3'.split()); "
        "print('torch' in sys.modules, status)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    lines = told.stdout.splitlines()
    assert lines[-1] == "False 0"
    assert lines[0] == "405.9 billion parameters"
    assert any(
        line.startswith("at least 1.04 s by the model: source rank 0 sends 51.3 GB between")
        for line in lines
    )
    assert "most bytes into a rank: 51.3 GB, destination rank 0" in lines
    assert any(
        "trainer (512 shards): 13.5 GB (weights 3.17 GB + gradients 3.17 GB + optimiser 6.34 GB"
        in x
        for x in lines
    )
    assert any("version in use 51.3 GB + version that arrives 51.3 GB" in line for line in lines)
    assert "  64 replicas, first 0: 555 MB" in told.stdout


def test_a_rank_s_line_adds_up_and_links_count(capsys):
    assert (
        main(["--model", "llama-8b", "--trainer", "2x4", "--generator", "2", "--link-gbps", "200"])
        == 0
    )
    slow = capsys.readouterr().out
    assert "trainer (2 replicas x 4 shards)" in slow and "bfloat16" in slow and ":scale" not in slow
    assert (
        main(["--model", "llama-8b", "--trainer", "2x4", "--generator", "2", "--link-gbps", "400"])
        == 0
    )
    seconds = [
        float(text.partition("at least ")[2].split()[0]) for text in (slow, capsys.readouterr().out)
    ]
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=0.05)


CONFIGS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 6},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
}


@pytest.mark.parametrize("family", CONFIGS)
def test_the_tensors_of_a_config_are_those_of_its_model(family, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **CONFIGS[family],
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = Decoder.of(str(tmp_path)).tensors("float32")
    assert found == {
        name: (tuple(each.shape), "float32") for name, each in model.named_parameters()
    }
    assert mesh_layout(found, STYLES, Mesh.of(1, 1, 2)) == mesh_layout(
        found, model.tp_plan, Mesh.of(1, 1, 2)
    )


def test_of_more_ranks_than_key_value_heads_neighbours_hold_the_same_rows():
    tensors = {
        "layers.0.self_attn.k_proj.weight": ((8, 3), "float32"),
        "layers.0.self_attn.k_proj.bias": ((8,), "float32"),
    }
    for held in mesh_layout(
        tensors, STYLES, RankGrid(tensor_parallel=4).mesh, key_value_heads=2
    ).tensors.values():
        rows = zip(
            held.shards.ranks.tolist(),
            held.shards.start[:, 0].tolist(),
            held.shards.stop[:, 0].tolist(),
            strict=True,
        )
        assert sorted(rows) == [(0, 0, 4), (1, 0, 4), (2, 4, 8), (3, 4, 8)]


def test_what_cannot_be_put_on_paper_is_refused(tmp_path, capsys):
    with pytest.raises(
        LayoutMismatch,
        match=r"found 32 .* and 8 key/value heads for 12 .* give a number that divides",
    ):
        on_paper(NAMED["llama-8b"], RankGrid(), RankGrid(tensor_parallel=12), Interconnect())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    for model in (str(tmp_path), str(tmp_path / "nowhere"), "llama-9b"):
        assert main(["--model", model]) == 2
        assert "give one of ['llama-405b'" in capsys.readouterr().err


def test_one_rank_holds_all_of_it():
    tensors = NAMED["llama-8b"].tensors("bfloat16")
    whole = mesh_layout(tensors, STYLES, RankGrid().mesh)
    assert whole == Layout.whole(tensors)
    assert whole.rank_bytes.tolist() == [2 * sum(math.prod(shape) for shape, _ in tensors.values())]


def test_the_last_ranks_may_hold_nothing_of_what_is_quantised():
    small = Decoder(layers=1, width=8, inner=16, heads=2, kv_heads=2, vocabulary=100, head_width=4)
    made = on_paper(
        small, RankGrid(shards=7), RankGrid(tensor_parallel=2), Interconnect(), quantized="fp8"
    )
    (trainer, *_) = made.held.values()
    quantised = trainer["what is quantised to be sent"]
    assert len(quantised) == 7 and quantised[0] > 0 == quantised[-1]
    assert "memory of each rank at the start" in str(made)
