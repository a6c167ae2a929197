"""A model that cannot be loaded says what is wrong, what was found and what to do, as a
ModelError.
"""

import json
import shutil

import pytest
import torch
from transformers import LlamaForSequenceClassification

from dataflow.model import Model
from operators.engine.build import adapt
from operators.models.folders import ModelError
from operators.models.loading import load_model, load_tokenizer


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "policy")


def refused(source, *words, **knobs):
    with pytest.raises(ModelError) as caught:
        load_model(Model(str(source), **knobs))
    text = str(caught.value)
    assert text.count(";") >= 1 and all(word in text for word in words), text


def test_a_folder_loads_in_the_type_asked_for(folder, make_model):
    loaded = load_model(Model(str(folder)))
    assert not loaded.training
    for name, value in make_model().state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert (
        next(load_model(Model(str(folder), dtype="bfloat16")).parameters()).dtype == torch.bfloat16
    )
    assert next(load_model(Model(str(folder)), dtype="float16").parameters()).dtype == torch.float16


def test_a_policy_folder_is_loaded_as_a_critic_whose_values_are_0(folder):
    critic = load_model(Model(str(folder), head="value"))
    assert torch.equal(critic(input_ids=torch.tensor([[3, 4, 5]])).logits, torch.zeros(1, 3, 1))
    assert torch.equal(
        critic.model.embed_tokens.weight, load_model(Model(str(folder))).model.embed_tokens.weight
    )


def test_a_critic_that_was_saved_keeps_its_head(folder, tmp_path):
    critic = load_model(Model(str(folder), head="value"))
    torch.nn.init.normal_(critic.score.weight)
    critic.save_pretrained(tmp_path)
    assert torch.equal(
        load_model(Model(str(tmp_path), head="value")).score.weight, critic.score.weight
    )


def test_a_judge_gives_a_number_per_sequence_and_one_without_a_head_is_refused(
    folder, make_model, tmp_path
):
    config = make_model().config
    config.num_labels = 1
    judge = LlamaForSequenceClassification(config)
    judge.save_pretrained(tmp_path)
    assert load_model(Model(str(tmp_path), head="score"))(
        input_ids=torch.tensor([[3, 4, 5]])
    ).logits.shape == (1, 1)
    refused(folder, "score.weight", "random", head="score")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "no folder")
    with pytest.raises(ModelError, match="no folder"):
        load_tokenizer(Model(str(tmp_path / "nowhere")))


def test_a_folder_without_a_config_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path, "config.json", "notes.txt")


def test_a_missing_shard_is_named(make_model, tmp_path):
    make_model().save_pretrained(tmp_path, max_shard_size="10KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    refused(tmp_path, lost.name)


def test_a_truncated_shard_is_refused(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(copy, str(copy))


def test_weights_that_the_config_needs_and_the_folder_lacks_are_named(copy):
    config = json.loads((copy / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (copy / "config.json").write_text(json.dumps(config))
    refused(copy, "model.layers.2")


def test_code_of_the_folder_runs_only_when_trusted(copy):
    config = json.loads((copy / "config.json").read_text())
    config["model_type"] = "homemade"
    config["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "own.py").write_text("raise SystemExit('the code ran')")
    refused(copy, "trust_remote_code=True")


def test_a_folder_without_a_tokenizer_is_refused(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="tokenizer of model"):
        load_tokenizer(Model(str(tmp_path)))


def test_a_model_that_keeps_other_state_than_keys_and_values_is_refused(make_model):
    model = make_model()
    forward = model.model.layers[0].forward
    model.model.layers[0].forward = lambda hidden, **given: forward(hidden.cumsum(1), **given)
    with pytest.raises(ModelError, match="only state is keys and values"):
        adapt(model, "recurrent")


def test_a_model_outside_the_attention_interface_is_refused(make_model):
    model = make_model()
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **given: (hidden_states, None)
    with pytest.raises(ModelError, match="attention interface"):
        adapt(model, "foreign")
