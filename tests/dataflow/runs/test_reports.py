"""`dataflow report`: one file that loads nothing, in which nothing of what models write acts."""

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pytest

from dataflow import cli
from dataflow.errors import RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.runs.examples import Examples, examples_of
from dataflow.runs.parts import rollouts
from dataflow.runs.report import report, write_report
from dataflow.runs.texts import escaped, visible
from dataflow.runs.which import parts_of

EVIL = (
    "</pre><script>alert(1)</script><img src=x"
    " onerror=alert(2)>\x1b[31mred\x1b[0m\u202egnp.exe\u2066\u200bz\x00\x7f"
)


EVIL_DRAWING = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9" onload="alert(1)">'
    '<script>alert(2)</script><a href="javascript:alert(3)"><text x="1">a</text></a>'
    '<text x="1" onclick="alert(4)">drawn\u202e</text></svg>'
)


VOID = {"meta", "link", "img", "br", "hr", "input", "base"}


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, the text, and whether all that
    opens is closed.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def harmless(text: str) -> Page:
    """A page in which nothing runs, and that asks nobody for anything."""
    page = Page(text)
    assert not page.open, f"never closed: {page.open}"
    for tag, attributes in page.elements:
        assert tag not in (
            "script",
            "img",
            "iframe",
            "link",
            "object",
            "embed",
            "form",
            "base",
            "foreignobject",
            "a" if not str(attributes.get("href", "")).startswith("#") else "",
        ), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), f"{name} of <{tag}>"
            assert name not in (
                "src",
                "srcset",
                "action",
                "formaction",
                "ping",
                "data",
            ), f"{name} of <{tag}>"
            if name in ("href", "xlink:href"):
                assert str(value).startswith("#")
    assert "url(" not in text
    assert "@import" not in text
    signs = set(text) & {
        chr(code)
        for code in (
            *range(9),
            *range(11, 32),
            127,
            *range(0x200B, 0x2010),
            *range(0x202A, 0x202F),
            *range(0x2060, 0x206A),
        )
    }
    assert not signs, f"signs that act: {[hex(ord(sign)) for sign in signs]}"
    return page


def test_a_report_has_curves_graph_rollouts_faults_ledger_and_environment(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.html"
    assert cli.report_run(made, out=out) == 0
    assert f"wrote {out}: " in capsys.readouterr().out
    page = harmless(out.read_text())
    text = " ".join(page.texts)
    ids = {attributes.get("id") for _, attributes in page.elements}
    assert {"curves", "graph", "rollouts", "faults", "ledger", "environment"} <= ids
    assert {attributes["href"] for tag, attributes in page.elements if tag == "a"} <= {
        f"#{name}" for name in ids
    }
    for wanted in (
        " = 48 trained + 0 dropped",
        "144 rollouts of 12 of 12 steps",
        "Best, by",
        "No worker ended",
        "finished",
        "pyarrow",
        "python",
        "length",
    ):
        assert wanted in text, wanted
    style = out.read_text().partition("<style>")[2].partition("</style>")[0]
    assert "prefers-color-scheme:dark" in style
    policies = [attributes.get("content") for tag, attributes in page.elements if tag == "meta"]
    assert any("default-src 'none'" in str(policy) for policy in policies)
    assert "width=device-width" in out.read_text()
    cli.report_run(made, out=out)  # a report is written over
    (tmp_path / "thesis.html").write_text("<p>years of work</p>")
    with pytest.raises(
        RunError, match="is there already and is no report; name another file with --out"
    ):
        cli.report_run(made, out=tmp_path / "thesis.html")


def test_what_models_prompts_scorers_and_errors_say_is_text(made: Path, tmp_path: Path) -> None:
    folder = RunFolder.open(shutil.copytree(made, tmp_path / "run"))
    table = folder.rollouts_of().read(1)
    for name, value in (("completion", EVIL), ("prompt", EVIL + "x" * (1 << 20)), ("error", EVIL)):
        told = pa.array([value] * 6 + [None if name == "error" else value] * 6)
        table = table.set_column(table.schema.get_field_index(name), name, told)
    table = table.append_column(EVIL, pa.array([EVIL] * table.num_rows))
    folder.rollouts_of().write(1, table)
    for step in range(2, 13):
        folder.rollouts_of().step_file(step).unlink()
    evil = json.dumps(EVIL)[1:-1]
    for name in ("graph.json", "config.json"):
        text = (folder.path / name).read_text()
        (folder.path / name).write_text(
            text.replace('"reward"', f'"{evil}"').replace("FakeTrainer", evil)
        )
    (folder.path / "faults.jsonl").write_text(
        json.dumps({"worker": EVIL, "cause": EVIL, "at": 1.0}) + "\n"
    )
    folder.ledger.unlink()  # so that the two files say what the run is
    folder.graph_svg.write_text(EVIL_DRAWING)
    text = report(folder)
    page = harmless(text)
    shown = "".join(page.texts)
    assert (
        "<script>alert(1)</script><img src=x"
        " onerror=alert(2)>␛[31mred␛[0m‹U+202E›gnp.exe‹U+2066›‹U+200B›z␀␡" in shown
    )
    assert "more characters" in shown and "drawn‹U+202E›" in shown
    assert len(text) < 600_000
    assert "With an error" in shown


@pytest.mark.parametrize("left", ["nothing", "graph", "metrics", "torn"])
def test_a_folder_of_which_little_is_left_has_a_report_too(
    made: Path, tmp_path: Path, left: str
) -> None:
    folder = RunFolder.create(tmp_path, "thin")
    if left != "nothing":
        shutil.copy(made / "graph.json", folder.path)
    if left in ("metrics", "torn"):
        (folder.path / "metrics.jsonl").write_text(
            '{"step": 1, "reward_mean": 0.5}\n{"step": 2, "rew'
        )
    if left == "torn":
        (folder.path / "faults.jsonl").write_text('{"worker": null}\n[1]\n{"wor')
        (folder.path / "config.json").write_text("[]")
    harmless(report(folder))


def test_signs_that_act_are_shown_and_all_others_are_themselves() -> None:
    assert visible("plain ünïcode 汉字 😀\n\ttab") == "plain ünïcode 汉字 😀\n\ttab"
    assert visible("\r\x9b\ufeff\u2028\ud800") == "␍‹U+009B›‹U+FEFF›‹U+2028›\ufffd"
    assert visible("x" * 10, 4) == "xxxx … 6 more characters"
    assert escaped("<&\"'") == "&lt;&amp;&quot;&#39;"


def test_the_best_the_worst_and_some_by_chance_are_chosen_alike_each_time(made: Path) -> None:
    parts, _ = parts_of(RunFolder.open(made))
    found, again = examples_of(parts), examples_of(parts)
    assert found == again
    assert [row["reward"] for row in found.best] == [1.0] * 3
    assert [row["reward"] for row in found.worst] == [0.0] * 3
    assert (found.looked, found.files, found.of_files) == (144, 12, 12)
    assert found.best[0]["step"] == 12, "of equal ones the latest"
    assert len({row["group_id"] for row in found.best}) == 3, "one of each group"
    assert not examples_of(parts, by="quality").by
    many = [part for part in parts for _ in range(5)]
    assert examples_of(many).files <= 40
    assert isinstance(examples_of([]), Examples)
    assert "no rollouts" in rollouts(Examples())


def test_a_report_is_there_whole_or_not(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataflow.runs import report as module

    def fail(*args: object, **how: object) -> str:
        raise RunError("in the midst of it")

    monkeypatch.setattr(module.parts, "rollouts", fail)
    with pytest.raises(RunError, match="in the midst"):
        write_report(RunFolder.open(made), tmp_path / "r.html")
    assert not list(tmp_path.iterdir())
