"""A reward model's numbers: those of transformers' plain forward on each text, whatever tokenizer
made the tokens.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from rigs.forwards import forwarding, language_model, lists_of, rollouts, saved, tokenizer_of
from rigs.heads import classifier
from rigs.policy import ALPHABET

from dataflow import Model
from dataflow.errors import OperatorError
from operators import RewardModel
from operators.forward_pass.reading import lay_out, read_ends, step_ends, tokens_at
from operators.models.loading import load_model, load_tokenizer

TEXTS = ("b2=c", "b2", "19 abc", "b2=c")


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] | trim + '. ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


STEPPED = "".join([*ALPHABET, "\n"])


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def judge(
    family: str = "Llama", tokenizer: Any = None, folder: Path | None = None, **changes: Any
) -> Model:
    assert folder is not None
    module = classifier(family, "SequenceClassification", **changes)
    return Model(str(saved(module, folder, tokenizer)), name="judge", head="score").frozen()


def plain_score(model: Model, text: str) -> float:
    ids = load_tokenizer(model)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(load_model(model)(input_ids=ids).logits[0, 0])


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
@pytest.mark.parametrize("pad", [0, None])
def test_scores_are_those_of_the_plain_forward_on_prompt_and_completion(
    family: str, pad: int | None, tmp_path: Path
) -> None:
    model = judge(family, folder=tmp_path, pad_token_id=pad)
    table = forwarding(RewardModel(model)).run(
        rollouts(3, TEXTS), rollouts(1, ("x",), prompt="what is it ")
    )
    wanted = [
        plain_score(model, prompt + text) for prompt, text in zip(*_texts(table), strict=True)
    ]
    assert table.column("score").type == pa.float64() and len(set(wanted)) == 4
    np.testing.assert_allclose(lists_of(table, "score"), wanted, atol=1e-5)


def test_the_judge_may_have_another_tokenizer_than_the_policy(tmp_path: Path) -> None:
    model = judge(tokenizer=tokenizer_of("".join(reversed(ALPHABET))), folder=tmp_path)
    table = forwarding(RewardModel(model)).run(rollouts(3, TEXTS))
    np.testing.assert_allclose(
        lists_of(table, "score"), [plain_score(model, "a1=" + text) for text in TEXTS], atol=1e-5
    )


def test_a_suffix_is_read_too(tmp_path: Path) -> None:
    model = judge(folder=tmp_path)
    (found,) = lists_of(
        forwarding(RewardModel(model, suffix=" =")).run(rollouts(3, ("b",))), "score"
    )
    assert found == pytest.approx(plain_score(model, "a1=b ="), abs=1e-5)


@pytest.mark.parametrize("prompt", ["a1=", '[{"role": "user", "content": "a1="}]'])
def test_a_chat_template_lays_the_text_out(prompt: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of()
    tokenizer.chat_template = TEMPLATE
    model = judge(tokenizer=tokenizer, folder=tmp_path)
    group = rollouts(3, ("b2",))
    group = group.set_column(group.schema.get_field_index("prompt"), "prompt", pa.array([prompt]))
    (found,) = lists_of(forwarding(RewardModel(model, chat=True)).run(group), "score")
    assert found == pytest.approx(plain_score(model, "user a1=. assistant b2. "), abs=1e-5)


def test_rows_that_failed_have_no_score_and_long_texts_fail(tmp_path: Path) -> None:
    model = judge(folder=tmp_path, max_position_embeddings=9)
    table = forwarding(RewardModel(model)).run(
        rollouts(0, ("b2", "c", "abcdefgh"), errors={0: "boom"})
    )
    assert [row is None for row in lists_of(table, "score")] == [True, False, True]
    assert table.column("error").to_pylist() == [
        "boom",
        None,
        "score: the text has 11 tokens, but 'judge' takes 9; lower max_tokens",
    ]


def test_a_template_that_changes_the_completion_fails_the_row(tmp_path: Path) -> None:
    tokenizer = tokenizer_of()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    model = judge(tokenizer=tokenizer, folder=tmp_path)
    table = forwarding(RewardModel(model, chat=True)).run(rollouts(3, ("b2",)))
    assert lists_of(table, "score") == [None]
    assert (
        "score: the judge's chat template changes the completion 'b2'"
        in table.column("error")[0].as_py()
    )


def test_a_judge_that_reads_in_both_directions_is_refused(tmp_path: Path) -> None:
    from operators.models.folders import ModelError

    with pytest.raises(ModelError, match="both directions"):
        forwarding(RewardModel(judge("Bert", folder=tmp_path)))


# Steps


def step_judge(tmp_path: Path, tokenizer: Any = None) -> Model:
    return judge(tokenizer=tokenizer or tokenizer_of(STEPPED), folder=tmp_path)


def test_a_process_reward_stands_at_the_last_token_of_each_step(tmp_path: Path) -> None:
    model = step_judge(tmp_path)
    text = "one\n\ntwo 2\n\nsix"
    group = rollouts(3, (text, "b"), tokenizer=tokenizer_of(STEPPED))
    table = forwarding(RewardModel(model, per="step")).run(group)
    found, other = lists_of(table, "score")
    prompt, letters = len("a1="), len(text)
    ends = {
        prompt + len("one\n\n") - 1: "one\n\n",
        prompt + len("one\n\ntwo 2\n\n") - 1: "one\n\ntwo 2\n\n",
        prompt + letters: text,
    }
    wanted = [
        plain_score(model, "a1=" + ends[at]) if at in ends else 0.0
        for at in range(prompt + letters + 1)
    ]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_allclose(other, [0.0, 0.0, 0.0, 0.0, plain_score(model, "a1=b")], atol=1e-5)
    assert table.column("score").type == pa.list_(pa.float32())


def test_steps_are_found_in_tokens_of_another_tokenizer(tmp_path: Path) -> None:
    """The policy's tokenizer is told, and the judge's differs: the numbers stand where the policy's
    tokens end.
    """
    reversed_ = tokenizer_of("".join(reversed(STEPPED)))
    policy = Model(str(saved(language_model(), tmp_path / "policy", reversed_)), name="policy")
    model = step_judge(tmp_path / "judge")
    group = rollouts(3, ("one\n\ntwo",), tokenizer=reversed_)
    (found,) = lists_of(
        forwarding(RewardModel(model, per="step", policy=policy)).run(group), "score"
    )
    places = np.flatnonzero(found).tolist()
    assert places == [len("a1=one\n\n") - 1, len("a1=one\n\ntwo")]
    np.testing.assert_allclose(
        np.array(found)[places],
        [plain_score(model, "a1=one\n\n"), plain_score(model, "a1=one\n\ntwo")],
        atol=1e-5,
    )


def test_steps_of_tokens_that_are_not_the_judges_are_refused(tmp_path: Path) -> None:
    model = step_judge(tmp_path)
    group = rollouts(3, ("one",), tokenizer=tokenizer_of("".join(reversed(STEPPED))))
    with pytest.raises(OperatorError, match=r"'score' looks for the last token.*give policy=Model"):
        forwarding(RewardModel(model, per="step")).run(group)


def test_a_completion_without_a_word_has_no_step(tmp_path: Path) -> None:
    group = rollouts(3, ("\n\n", "a"), tokenizer=tokenizer_of(STEPPED))
    found, other = lists_of(
        forwarding(RewardModel(step_judge(tmp_path), per="step")).run(group), "score"
    )
    assert found == [0.0] * 6 and np.count_nonzero(other) == 1


# Texts


def test_a_step_ends_behind_each_cut_and_at_the_end() -> None:
    assert step_ends("a\n\nbc\n\nd", "\n\n") == [3, 7, 8]
    assert step_ends("a\n\n", "\n\n") == [3]
    assert step_ends("a\n\n\n\nb", "\n\n") == [3, 6]
    assert step_ends("abc", "\n\n") == [3]
    assert step_ends("", "\n\n") == step_ends(" \n\n ", "\n\n") == []


def test_the_token_in_which_a_character_lies_is_found() -> None:
    """Ends of: a start token, "ab", "c", "def", an end token."""
    assert tokens_at(np.array([0, 2, 3, 6, 0]), np.array([1, 2, 3, 4, 6])).tolist() == [
        1,
        1,
        2,
        3,
        3,
    ]


class Pieces:
    """Decodes tokens that stand for several letters."""

    names = ("", "ab", "c", "def")

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.names[token] for token in tokens)


def test_the_token_with_which_so_much_text_is_there_is_found_by_decoding() -> None:
    assert read_ends(Pieces(), [1, 0, 2, 3, 0], [1, 2, 3, 5, 6]) == [0, 0, 2, 3, 3]
    with pytest.raises(ValueError, match="less text than the completion"):
        read_ends(Pieces(), [1], [3])


def test_a_row_without_a_prompt_says_so() -> None:
    with pytest.raises(ValueError, match="the prompt is null"):
        lay_out(None, None, "a", suffix="")


def _texts(table: pa.Table) -> tuple[list[str], list[str]]:
    return table.column("prompt").to_pylist(), table.column("completion").to_pylist()
