"""`graphs.arithmetic`: its questions, and a short run of it on a small policy that has a chat
template.
"""

import re
import shutil
from pathlib import Path

import pytest

from dataflow import main
from dataflow.folder.run_folder import RunFolder
from dataflow.history.verify import verify
from graphs import arithmetic
from graphs.tasks import questions
from operators.rewards.match import number

TASKS = ("sums", "products")
CHATML = (
    "{% for message in messages %}{{ message['role'] + ':' + message['content'] + ';' }}{% endfor"
    " %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_is_what_the_question_asks_for(task: str) -> None:
    for row in questions.rows(task, 300, seed=0):
        asked = re.fullmatch(
            rf"What is (\d+ [-+*] \d+)\? {re.escape(questions.ASK)}", row["prompt"]
        )
        assert asked is not None and int(row["answer"]) == eval(asked[1]) >= 0
        assert number(f"It is {row['answer']}.", row["answer"]) == 1.0


@pytest.mark.parametrize("task", TASKS)
def test_no_held_out_question_is_trained(task: str) -> None:
    trained = {row["prompt"] for row in questions.rows(task, 2000, seed=0)}
    held_out = {row["prompt"] for row in questions.rows(task, 200, seed=0, held_out=True)}
    assert trained and held_out and not trained & held_out


def test_word_problems_are_evaluated_on_as_many_as_sums(tmp_path: Path) -> None:
    """GSM8K's test split has 1,319: a quarter of an hour of answers on a laptop."""
    rows = (f'{{"question": "Problem {i}?", "answer": "#### {i}"}}\n' for i in range(300))
    (tmp_path / "test.jsonl").write_text("".join(rows))
    assert questions.prompts("gsm8k", gsm8k=str(tmp_path), held_out=True).count() == 256


def test_chains_have_the_answers_of_their_package() -> None:
    pytest.importorskip(
        "reasoning_gym",
        reason="reasoning-gym is not installed; pip install dataflow-rl[reasoning-gym]",
    )
    for row in questions.rows("chains", 50, seed=0):
        asked = re.fullmatch(r"What is ([-+ \d]+)\? .*", row["prompt"])
        assert asked is not None and int(row["answer"]) == eval(asked[1])


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("kl", [pytest.param(0.0, marks=pytest.mark.slow), 0.05])
def test_a_policy_with_a_chat_template_trains_on_its_own_answers(
    policy: Path, kl: float, tmp_path: Path
) -> None:
    chatting = shutil.copytree(policy, tmp_path / "policy")
    (chatting / "chat_template.jinja").write_text(CHATML)
    flags = {
        "policy": chatting,
        "kl": kl,
        "prompts-per-step": 2,
        "group-size": 2,
        "max-tokens": 4,
        "eval-every": 100,
        "steps": 1,
        "runs": tmp_path / "runs",
    }
    main(
        arithmetic.build,
        args=[part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
        + ["--inline", "--quiet"],
    )
    (folder,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    assert verify(folder).clean, verify(folder).line
    (step,) = [
        line for line in RunFolder.open(folder).read_metrics() if line.get("node") == "trainer"
    ]
    assert ("kl" in step) == bool(kl)
