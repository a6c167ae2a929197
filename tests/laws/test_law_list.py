"""The list of laws is that of the tree, and each of them is noticed when it is broken."""

from pathlib import Path

import pytest

from .law import ROOT, Law
from .page import page
from .rooms import LAWS, ROOMS
from .trial import asked, copied, tried


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_what_keeps_each_law_is_there_and_can_be_broken(law: Law) -> None:
    law.broken()


def test_every_law_has_its_test() -> None:
    for law in LAWS:
        assert law.test_id.endswith(law.test)


def test_no_law_is_listed_twice() -> None:
    names = [law.name for law in LAWS]
    assert len(set(names)) == len(names)


def test_the_page_is_that_of_the_list() -> None:
    assert (ROOT / "docs" / "laws.md").read_text() == page(ROOMS)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("tree"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_laws_hold_in_a_whole_copy(copy: Path) -> None:
    word = asked(list(dict.fromkeys(law.test_id for law in LAWS)), copy, 1200.0)
    assert word.said == "passed"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_a_broken_law_is_noticed(law: Law, copy: Path) -> None:
    word = tried(law, copy)
    assert word.failed, f"{law.says}: {word.said}"
