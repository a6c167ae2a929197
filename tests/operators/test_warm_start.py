"""Laws of the warm start: a real Hugging Face folder, the same for the same spec, never
half-made.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from dataflow.errors import GraphError
from dataflow.model_files import tensor_shapes
from operators.warm_start import WarmStartError, launch, warm_start
from operators.warm_start.__main__ import ORPHANED
from operators.warm_start.launch import RECORD_FILE, WarmStartSpec, recorded_fingerprint

pytestmark = pytest.mark.usefixtures("forked")


ALPHABET = "ab="


EXAMPLES = [("ab=", "a"), ("ba=", "b"), ("aab=", "aa")]


SMALL = {
    "alphabet": ALPHABET,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "steps": 4,
    "seed": 0,
    "max_positions": 8,
}


@pytest.fixture(scope="module")
def made(forked, tmp_path_factory):
    """A policy made by the real process, with what stderr showed meanwhile."""
    return warm_start(tmp_path_factory.mktemp("made") / "policy", examples=iter(EXAMPLES), **SMALL)


@pytest.fixture
def fake_training(monkeypatch):
    """Stands in for the process: notes each spec and saves a policy folder that is nothing but its
    record.
    """
    specs = []

    def train(work, spec, report, timeout_s):
        specs.append(spec)
        report(spec.steps, 1.0)
        (work / "policy").mkdir()
        (work / "policy" / RECORD_FILE).write_text(json.dumps({"fingerprint": spec.fingerprint}))

    monkeypatch.setattr(launch, "_train", train)
    return specs


def test_the_folder_loads_as_any_hugging_face_policy_and_generates(made):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(made),
        AutoTokenizer.from_pretrained(made),
    )
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    inputs = tokenizer(["ab=", "b="], return_tensors="pt", padding=True)
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    tokens = model.generate(**inputs, max_new_tokens=2, do_sample=True, top_k=0)
    assert tokens.shape[0] == 2 and 3 < tokens.shape[1] <= 5


def test_the_tokenizer_has_a_token_per_character_and_gives_every_text_back(made):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made)
    tokens = tokenizer("aab=ba")["input_ids"]
    assert len(tokens) == 6
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == "aab=ba"
    assert tokenizer("aZ")["input_ids"][1] == tokenizer.unk_token_id


def test_what_is_promised_of_a_policy_is_what_its_files_tell(made):
    spec = WarmStartSpec(**json.loads((made / RECORD_FILE).read_text())["spec"])
    config = json.loads((made / "config.json").read_text())
    promise = spec.promise()
    assert promise.shapes == tensor_shapes(made / "model.safetensors")
    assert dict(promise.config) == {name: config[name] for name in promise.config}


def test_the_record_tells_what_made_the_folder(made):
    record = json.loads((made / RECORD_FILE).read_text())
    assert (
        WarmStartSpec(**record["spec"]).fingerprint
        == record["fingerprint"]
        == recorded_fingerprint(made)
    )
    assert record["examples"] == len(EXAMPLES)
    assert record["spec"]["steps"] == 4


def test_a_folder_of_the_same_spec_is_reused_and_one_of_another_spec_replaced(
    tmp_path, fake_training
):
    for _ in range(2):
        assert warm_start(tmp_path / "p", examples=EXAMPLES, **SMALL) == tmp_path / "p"
    assert len(fake_training) == 1
    warm_start(tmp_path / "p", examples=EXAMPLES, **SMALL | {"seed": 1})
    warm_start(tmp_path / "p", examples=EXAMPLES[:2], **SMALL | {"seed": 1})
    assert len(fake_training) == 3
    assert recorded_fingerprint(tmp_path / "p") == fake_training[-1].fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_every_field_of_the_spec_changes_its_fingerprint(fake_training, tmp_path):
    warm_start(tmp_path / "p", examples=EXAMPLES, **SMALL)
    changes = {
        "alphabet": "ba=",
        "layers": 2,
        "width": 32,
        "heads": 4,
        "mlp_width": 24,
        "max_positions": 9,
        "steps": 5,
        "batch_size": 2,
        "learning_rate": 1e-4,
        "seed": 1,
        "threads": 2,
    }
    for change in changes.items():
        warm_start(tmp_path / "p", examples=EXAMPLES, **SMALL | dict([change]))
    assert len({spec.fingerprint for spec in fake_training}) == len(changes) + 1


def test_a_failed_warm_start_leaves_the_folder_as_it_was(tmp_path, fake_training, monkeypatch):
    warm_start(tmp_path / "p", examples=EXAMPLES, **SMALL)
    before = (tmp_path / "p" / RECORD_FILE).read_text()

    def fail(work, spec, report, timeout_s):
        (work / "policy").mkdir()
        (work / "policy" / "model.safetensors").write_bytes(b"half")
        raise WarmStartError("killed")

    for fault, error in ((fail, "killed"), (lambda *_: None, "without a complete policy")):
        monkeypatch.setattr(launch, "_train", fault)
        for name in ("p", "new"):
            with pytest.raises(WarmStartError, match=error):
                warm_start(tmp_path / name, examples=EXAMPLES, **SMALL | {"seed": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    assert (tmp_path / "p" / RECORD_FILE).read_text() == before


def test_two_that_make_the_same_policy_at_once_both_get_it(tmp_path, fake_training, monkeypatch):
    train = launch._train

    def race(work, spec, report, timeout_s):
        train(work, spec, report, timeout_s)
        if not (tmp_path / "p").exists():
            shutil.copytree(work / "policy", tmp_path / "p")

    monkeypatch.setattr(launch, "_train", race)
    assert recorded_fingerprint(warm_start(tmp_path / "p", examples=EXAMPLES, **SMALL)) is not None


def test_a_folder_that_no_warm_start_made_is_never_replaced(tmp_path, fake_training):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "model.safetensors").write_bytes(b"months of work")
    with pytest.raises(GraphError, match="name another folder"):
        warm_start(tmp_path / "precious", examples=EXAMPLES, **SMALL)
    assert (tmp_path / "precious" / "model.safetensors").read_bytes() == b"months of work"
    assert not fake_training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"examples": []}, "found none"),
        ({"alphabet": "aab="}, "each character once"),
        ({"steps": 0}, "steps .* found 0"),
        ({"width": 18, "heads": 4}, "multiple of twice its heads"),
        ({"learning_rate": 2.0}, "between 0 and 1"),
    ],
)
def test_arguments_that_could_not_train_are_refused_before_any_process_starts(
    tmp_path, fake_training, change, message
):
    with pytest.raises(GraphError, match=message):
        warm_start(tmp_path / "p", **{"examples": EXAMPLES, **SMALL} | change)
    assert not fake_training and not list(tmp_path.iterdir())


def test_an_example_outside_of_the_alphabet_or_too_long_is_named_by_the_process(tmp_path):
    with pytest.raises(GraphError, match=r"example 3 .* outside of the alphabet; found .*Z"):
        warm_start(tmp_path / "p", examples=[*EXAMPLES, ("Z=", "a")], **SMALL)
    assert not list(tmp_path.iterdir())

    from operators.warm_start.train import character_tokenizer, encode

    with pytest.raises(GraphError, match=r"example 1 .* too long; found 9 tokens"):
        encode(character_tokenizer(ALPHABET, 8), [("a=", "a"), ("aaaaaa=", "a")], 8)


def test_a_warm_start_that_outlasts_its_limit_is_ended_with_its_process(tmp_path):
    with pytest.raises(WarmStartError, match=r"did not end in time; found 0 of 4 steps"):
        warm_start(tmp_path / "p", examples=EXAMPLES, timeout_s=0.01, **SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("fresh")
@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 2, 3])
def test_a_process_that_is_killed_is_started_again_twice_and_makes_the_same_policy(
    tmp_path, made, monkeypatch, capsys, kills
):
    """Killed as it starts, in its midst, and when it has told of its last step."""
    started = []

    def program(*args, **how):
        started.append(real(*args, **how))
        strike(0)
        return started[-1]

    def strike(step, loss=0.0):
        if len(started) <= kills and step == (0, 2, SMALL["steps"])[len(started) - 1]:
            started[-1].kill()

    real = launch.program
    monkeypatch.setattr(launch, "program", program)
    monkeypatch.setattr(launch, "shown", lambda *_: contextlib.nullcontext(strike))
    if kills == 3:
        with pytest.raises(WarmStartError, match="exit status -9 after 4 of 4 steps"):
            warm_start(tmp_path / "policy", examples=iter(EXAMPLES), **SMALL)
        return
    again = warm_start(tmp_path / "policy", examples=iter(EXAMPLES), **SMALL)
    assert (again / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()
    assert capsys.readouterr().err.count("ended by signal 9; it is started again") == kills


def test_the_process_ends_when_its_parent_is_gone(tmp_path):
    ours, theirs = socket.socketpair()
    command = [
        sys.executable,
        "-m",
        "operators.warm_start",
        str(tmp_path),
        "--parent",
        str(theirs.fileno()),
    ]
    # reading it blocks: without the watch the process would stay for ever
    os.mkfifo(tmp_path / "spec.json")
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    ours.close()
    assert process.wait(timeout=60) == ORPHANED


def test_the_policy_and_its_loss_repeat_and_only_answers_and_their_end_are_learnt():
    import torch

    from operators.warm_start.train import IGNORED, character_tokenizer, encode, small_llama, train

    fields = SMALL | {
        "mlp_width": 24,
        "batch_size": 2,
        "learning_rate": 0.01,
        "threads": 1,
        "steps": 30,
    }
    spec = WarmStartSpec(examples_sha256="", **fields)
    tokenizer = character_tokenizer(ALPHABET, 8)
    tokens, labels, lengths = encode(tokenizer, EXAMPLES, 8)
    end = tokenizer.eos_token_id
    assert lengths.tolist() == [5, 5, 7]
    assert labels[0].tolist() == [IGNORED] * 3 + [tokens[0, 3], end, IGNORED, IGNORED]

    losses: list[list[float]] = []
    models = [small_llama(spec, tokenizer) for _ in range(2)]
    for model in models:
        losses.append([])
        train(model, tokenizer, EXAMPLES, spec, lambda step, loss: losses[-1].append(loss))
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] / 2
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


def test_progress_is_plain_lines_where_there_is_no_terminal(tmp_path, fake_training, capsys):
    warm_start(tmp_path / "p", examples=EXAMPLES, **SMALL)
    assert capsys.readouterr().err == "warm start of p: step 4/4, loss 1.000\n"


@pytest.mark.usefixtures("fresh")
def test_the_caller_never_imports_torch(tmp_path):
    code = "import sys, operators.warm_start; print('torch' in sys.modules)"
    assert (
        subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip()
        == "False"
    )
