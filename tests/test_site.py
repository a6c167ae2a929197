"""The site that `make docs` makes: it has every page and every public name, and is made without a
warning.
"""

import importlib
import re
import subprocess
import sys

import pytest

from docs.site.pages import PUBLIC, ROOT, api_pages, names_of, sources

NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


def test_the_navigation_names_each_page_once() -> None:
    pages = [str(path.relative_to(ROOT)) for path in sources() if path.suffix == ".md"]
    assert sorted(re.findall(r"\S+\.md", NAV)) == sorted([*pages, *api_pages()])


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_an_entry_with_its_docstring(module: str) -> None:
    page = api_pages()[f"api/{module}.md"]
    for name in names_of(module):
        assert re.search(rf"^::: [\w.]+\.{name}$", page, re.MULTILINE), name
        assert f"heading: {name}\n" in page
        found = getattr(importlib.import_module(module), name)
        assert isinstance(found, str | dict) or getattr(found, "function", found).__doc__, name


def test_the_reference_has_the_modules_that_the_structure_calls_public() -> None:
    said = (
        (ROOT / "docs" / "structure.md")
        .read_text()
        .partition("Users import from ")[2]
        .partition(".\n")[0]
    )
    assert set(re.findall(r"`([\w.]+)`", said)) == set(PUBLIC)


def test_the_reader_of_an_operator_sees_its_knobs() -> None:
    page = api_pages()["api/operators.md"]
    trainer = page.partition("heading: Trainer\n")[2].partition("\n:::")[0]
    assert "'lr'" in trainer and "'prompts_per_step'" in trainer and "'build'" not in trainer


def test_examples_are_shown_as_code_and_knobs_with_their_defaults() -> None:
    pytest.importorskip("griffe")
    from docs.site.docstrings import as_page

    said = "One.\n\nIts knobs: `a.b.C`.\n\n>>> 1 + 1\n2\n\nMore.\n\n>>> 2"
    assert as_page(said) == "One.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore.\n\n```pycon\n>>> 2\n```"


@pytest.mark.slow
def test_the_site_is_made_without_a_warning() -> None:
    for package in ("mkdocs", "mkdocstrings", "material"):
        pytest.importorskip(package)
    subprocess.run([sys.executable, ROOT / "docs" / "site" / "pages.py"], check=True, timeout=60)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "build" / "docs" / "api" / "operators.html").read_text()
    assert "operators.Trainer.lr" in page and "In a live run" in page
    assert "settable" not in page and "field(" not in page
    shown = re.sub(r"<(pre|code).*?</\1>", "", page, flags=re.DOTALL)
    assert "&gt;&gt;&gt;" not in shown and "Args:" not in shown
