"""Models in GGUF files: converted to the number and the id, or refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

gguf = pytest.importorskip("gguf")

import gguf_files  # noqa: E402
from gguf_files import tiny_gguf, tiny_module  # noqa: E402

from dataflow import Model  # noqa: E402
from dataflow.gguf.conversion import converted  # noqa: E402
from dataflow.model_files import config_of, folder_here, promised  # noqa: E402
from operators.models.loading import load_configs, load_model, load_tokenizer  # noqa: E402

FAMILIES = ("llama", "qwen2", "qwen3")
IDS = torch.arange(3, 43).reshape(2, 20)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_is_the_module_that_its_file_was_written_from(
    family: str, tied: bool, tmp_path: Path
) -> None:
    module = tiny_module(family, tied=tied)
    model = Model(str(tiny_gguf(tmp_path / "m.gguf", family, module=module)))
    made = load_model(model)
    assert {name: weight.tolist() for name, weight in made.state_dict().items()} == {
        name: weight.tolist() for name, weight in module.state_dict().items()
    }
    with torch.no_grad():
        assert torch.equal(made(IDS).logits, module(IDS).logits)
    assert load_configs(model)[1].eos_token_id == 2


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "F16", "BF16"])
def test_weights_are_those_that_gguf_turns_back(kind: str, tmp_path: Path) -> None:
    module = tiny_module("llama", tied=False)
    path = tiny_gguf(tmp_path / "m.gguf", module=module, kind=kind)
    made = load_model(Model(str(path))).state_dict()
    of = gguf.GGMLQuantizationType[kind]
    for name, weight in module.state_dict().items():
        wanted = weight.numpy()
        if weight.dim() == 2:
            wanted = gguf.quants.dequantize(gguf.quants.quantize(wanted, of), of)
        assert np.array_equal(made[name].numpy(), wanted), name


@pytest.mark.parametrize("family", FAMILIES)
def test_an_explanation_is_told_of_the_model_without_a_conversion(
    family: str, tmp_path: Path, cache: Path
) -> None:
    source = str(tiny_gguf(tmp_path / "m.gguf", family, kind="Q8_0"))
    told, promise = config_of(source), promised(source)
    assert promise is not None and not (cache / "dataflow-rl" / "models").exists()
    folder = converted(source)
    assert json.loads((folder / "config.json").read_text()) == told == config_of(source)
    module = load_model(Model(source))
    assert {
        name: list(weight.shape) for name, weight in module.named_parameters()
    } == promise.shapes
    assert promised(source) is None and folder_here(source) == folder


@pytest.mark.parametrize(
    ("family", "pre", "text", "wanted"),
    [
        ("llama", "smollm", "a  12 37", ["a", "ĠĠ", "1", "2", "Ġ", "3", "7"]),
        ("llama", "gpt-2", "a  12 37", ["a", "Ġ", "Ġ", "12", "Ġ3", "7"]),
        ("llama", "qwen2", "a  12 37", ["a", "Ġ", "Ġ", "1", "2", "Ġ", "3", "7"]),
        ("llama", "llama-bpe", "a  12 37", ["a", "Ġ", "Ġ", "12", "Ġ", "3", "7"]),
        ("qwen2", "qwen2", "a  12 37", ["a", "Ġ", "Ġ", "1", "2", "Ġ", "3", "7"]),
        ("qwen3", "qwen2", "a  12 37", ["a", "Ġ", "Ġ", "1", "2", "Ġ", "3", "7"]),
    ],
)
def test_text_is_cut_as_the_file_says(
    family: str, pre: str, text: str, wanted: list[str], tmp_path: Path
) -> None:
    """By transformers' own GGUF reader, 5.23, "smollm" would be cut as "gpt-2"."""
    path = tiny_gguf(tmp_path / "m.gguf", family, pre=pre)
    tokenizer = load_tokenizer(Model(str(path)))
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == wanted
    assert tokenizer.get_vocab() == {
        token: number for number, token in enumerate(gguf_files.tokens())
    }
    assert tokenizer.chat_template == gguf_files.TEMPLATE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert (
        tokenizer.decode(
            tokenizer("<|im_start|>Hi <|im_end|>")["input_ids"], skip_special_tokens=True
        )
        == "Hi "
    )
    plain = read_tokenizer(converted(str(path)) / "tokenizer.json")
    for probe in ("What's  12+37?\n\n  e\u0301 I'LL ½ 日本", "  1234,5\tx_y  "):
        assert tokenizer(probe)["input_ids"] == plain.encode(probe).ids


def read_tokenizer(path: Path) -> Any:
    return tokenizers.Tokenizer.from_file(str(path))


def test_a_text_begins_and_ends_as_the_file_says(tmp_path: Path) -> None:
    said = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = load_tokenizer(Model(str(tiny_gguf(tmp_path / "both.gguf", said=said))))
    assert tokenizer.convert_ids_to_tokens(tokenizer("in")["input_ids"]) == [
        "<|im_start|>",
        "in",
        "<|im_end|>",
    ]
    silent = tiny_gguf(
        tmp_path / "silent.gguf", pre="llama-bpe", said={"tokenizer.ggml.add_bos_token": None}
    )
    tokenizer = load_tokenizer(Model(str(silent)))
    assert tokenizer.convert_ids_to_tokens(tokenizer("in")["input_ids"]) == ["<|im_start|>", "in"]
