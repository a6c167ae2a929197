"""Laws of the tasks: prompts repeat, held-out prompts are apart, numbers are compared as
numbers.
"""

import json
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import RecordError
from graphs.tasks import calculator, guess, products, sorting
from operators.warm_start import EOS

GENERATORS = pytest.mark.parametrize(
    "task",
    [sorting, calculator, guess, products],
    ids=["sorting", "calculator", "guess", "products"],
)


@GENERATORS
def test_the_same_seed_gives_the_same_rows_and_another_seed_gives_others(task):
    first, again, other = (list(task.rows(50, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(first) == 50


@GENERATORS
def test_no_held_out_prompt_is_ever_a_training_prompt(task):
    training = {row["prompt"] for seed in range(4) for row in task.rows(300, seed=seed)}
    held_out = {
        row["prompt"] for seed in range(4) for row in task.rows(100, seed=seed, held_out=True)
    }
    assert held_out and not training & held_out


@pytest.mark.parametrize("task", [sorting, calculator], ids=["sorting", "calculator"])
def test_a_rows_own_answer_earns_the_whole_reward(task):
    reward = {sorting: sorting.reward, calculator: calculator.reward}[task]
    for row in task.rows(300, seed=3):
        assert reward(row["answer"], row["answer"]) == 1.0
        assert reward(row["answer"] + "9", row["answer"]) == 0.0
        assert reward("", row["answer"]) == 0.0


def test_no_held_out_answer_of_sorting_is_trained_on_in_another_order():
    training = {row["answer"] for row in sorting.rows(3000, seed=0)}
    held_out = {row["answer"] for row in sorting.rows(1000, seed=0, held_out=True)}
    assert not training & held_out


def test_sorting_asks_for_three_to_ten_different_letters_in_order():
    lengths = set()
    for row in sorting.rows(400, seed=0):
        letters = row["prompt"].removesuffix("=")
        assert row["prompt"] == letters + "="
        assert row["answer"] == "".join(sorted(set(letters)))
        assert len(set(letters)) == len(letters)
        assert set(row["prompt"]) <= set(sorting.ALPHABET)
        lengths.add(len(letters))
    assert lengths == set(range(3, 11))


def test_sorting_pays_for_the_whole_answer_only():
    assert sorting.reward("abdg", "abdg") == 1.0
    for wrong in ("abd", "abdgg", "gbda", "ABDG", "abdg="):
        assert sorting.reward(wrong, "abdg") == 0.0


def test_made_up_expressions_have_their_own_value_as_answer_and_fit_the_tasks_limits():
    for row in calculator.rows(500, seed=0):
        assert calculator.value(row["prompt"].removesuffix("=")) == calculator.number(row["answer"])
        assert set(row["prompt"] + row["answer"]) <= set(calculator.ALPHABET)
        assert len(row["prompt"]) <= calculator.LONGEST_PROMPT
        assert len(row["answer"]) < calculator.MAX_TOKENS


def test_made_up_expressions_have_the_operators_of_gsm8k():
    binary = [row["prompt"] for row in calculator.rows(2000, seed=0)]
    share = {sign: sum(sign in prompt for prompt in binary) / len(binary) for sign in "*+-/"}
    assert share["*"] == pytest.approx(0.42, abs=0.05)
    assert share["+"] == pytest.approx(0.25, abs=0.05)
    assert share["-"] == pytest.approx(0.18, abs=0.05)
    assert share["/"] == pytest.approx(0.20, abs=0.05)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24", "24"),
        ("-5", "-5"),
        ("+18", "18"),
        (".2", "1/5"),
        ("0.20", "1/5"),
        ("5.", "5"),
        ("1,000", "1000"),
        ("12,345,678.5", "24691357/2"),
        ("$3.50", "7/2"),
        ("50%", "1/2"),
        (" 7 ", "7"),
        ("007", "7"),
    ],
)
def test_a_number_is_read_exactly_however_it_is_written(text, expected):
    assert calculator.number(text) == Fraction(expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "-",
        ".",
        "1,00",
        "1,0000",
        "--5",
        "2+2",
        "3/4",
        "24 apples",
        "1e5",
        "0x10",
        "٣",
        "²",
        "nan",
        "9" * 101,
    ],
)
def test_what_is_no_number_is_none(text):
    assert calculator.number(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("48/2", "24"),
        ("2/5*50", "20"),
        ("24*(1/6)", "4"),
        ("71+-3", "68"),
        ("-48+21+(-3)", "-30"),
        ("+2", "2"),
        ("30-(30*(10/100))", "27"),
        ("1/3+1/3+1/3", "1"),
        ("18-6-4-2", "6"),
        ("64/8/2", "4"),
        ("1,000*.2", "200"),
        ("50%*80", "40"),
        ("2 + 3 * 4", "14"),
        ("(5)", "5"),
    ],
)
def test_an_expression_has_its_exact_value(text, expected):
    assert calculator.value(text) == Fraction(expected)


NO_EXPRESSIONS = ["", "560//10", "1/0", "(1", "1)", "2**3", "x*2", "5+", "3 4a", "1" + "+1" * 60]


@pytest.mark.parametrize("text", NO_EXPRESSIONS)
def test_what_is_no_expression_is_none(text):
    assert calculator.value(text) is None


@given(st.text("0123456789.+-*/()%,$ =", max_size=30))
def test_any_text_is_a_number_an_expression_or_none_but_never_an_exception(text):
    alone, whole = calculator.number(text), calculator.value(text)
    assert alone is None or alone == whole


@given(st.integers(-(10**9), 10**9), st.integers(0, 3))
def test_trailing_zeros_never_change_a_number(units, zeros):
    text = f"{units / 4:.2f}"
    assert calculator.reward(text + "0" * zeros, text) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("0.20", ".2", 1.0),
        ("45", "45.00", 1.0),
        ("1,000", "1000", 1.0),
        ("24", "25", 0.0),
        ("", "24", 0.0),
        ("24=", "24", 0.0),
        ("48/2", "24", 0.0),
        ("3/4", "3/4", 1.0),
        ("0.75", "3/4", 1.0),
        ("-3", "3", 0.0),
        ("50%", "0.5", 1.0),
        ("(24)", "24", 0.0),
    ],
)
def test_a_completion_is_paid_for_its_number_never_for_repeating_the_division(
    completion, answer, expected
):
    assert calculator.reward(completion, answer) == expected


def test_the_steps_of_a_row_come_in_order_and_unreadable_ones_are_skipped():
    answer = (
        "Half is 48/2 = <<48/2=24>>24. So $<<1,000*$.5=500.00>>500, but <<560//10=56>>56,"
        " <<x*2=4>>4, <<=5>>5, <<5=>>, <<7>>7, <<a=b>> and <<1/0=0>>0 say nothing. <<9=9>>9"
        f" <<3/4=3/4>> <<{'1+' * 30}1=31>>\n#### 72"
    )
    assert calculator.steps({"question": "?", "answer": answer}) == [
        {"prompt": "48/2=", "answer": "24"},
        {"prompt": "1000*.5=", "answer": "500.00"},
        {"prompt": "9=", "answer": "9"},
        {"prompt": "3/4=", "answer": "3/4"},
    ]


def test_a_file_is_read_row_by_row_and_a_broken_line_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = [json.dumps({"question": "?", "answer": f"<<{n}+1={n + 1}>>"}) for n in range(3)]
    path.write_text("\n".join([*good, ""]))
    assert [row["prompt"] for row in calculator.read(path)] == ["0+1=", "1+1=", "2+1="]
    for broken in ("{", "[1]", '{"question": "?"}'):
        path.write_text("\n".join([good[0], broken]))
        with pytest.raises(RecordError, match=r"found .*; (mend|give)") as caught:
            list(calculator.read(path))
        assert f"{path}:2" in str(caught.value)


def test_unseen_rows_are_those_that_training_never_showed():
    training = [{"prompt": "1+1=", "answer": "2"}]
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
    assert calculator.unseen(rows, training) == [rows[1]]


def test_the_tasks_import_no_torch():
    code = (
        "import sys; from graphs.tasks import calculator, sorting, text; print('torch'"
        " in sys.modules)"
    )
    found = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert found.strip() == "False"


def test_a_guess_is_judged_by_where_the_secret_lies():
    assert [guess.judge(said, 5) for said in ("5", "4", "6", "", "55", "~", "g")] == [
        "=",
        "+",
        "-",
        "?",
        "?",
        "?",
        "?",
    ]


def test_a_warm_start_of_guessing_shows_whole_games_turn_by_turn():
    shown = list(guess.examples(400, seed=0))
    assert len(shown) == 400
    secrets = set(guess.DIGITS)
    for talk, said in shown:
        assert said in secrets and set(talk.replace(EOS, "")) <= set(guess.ALPHABET)
        assert talk.count(EOS) < guess.TURNS and "=" not in talk
    halves = sum(talk.endswith("?") for talk, _ in shown)
    assert 80 < halves < 200, "as many as there are games"


def test_a_warm_start_of_products_shows_calls_that_are_read_and_answers_that_were_heard():
    shown = list(products.examples(4000, seed=0))
    assert len(shown) == 4000 and all(
        set((talk + said).replace(EOS, "")) <= set(products.ALPHABET) for talk, said in shown
    )
    mul, read = products.calculator(), products.CALLS.format()
    right = 0
    for talk, said in shown:
        turn = read.read(
            said, [{"function": {"name": "mul", "parameters": {"properties": {"a": {}, "b": {}}}}}]
        )
        if EOS in talk:
            right += talk.endswith(said) and talk.split(EOS)[1] == said
            assert "tool_calls" not in turn.message and len(said) < products.MAX_TOKENS
        elif turn.message.get("tool_calls"):
            arguments = json.loads(turn.message["tool_calls"][0]["function"]["arguments"])
            right += talk == f"{arguments['a']}*{arguments['b']}=" and mul(**arguments).isdigit()
    assert 0.55 < right / len(shown) < 0.7
    assert products.calculator(blank=True)(2, 3) == "~"
