"""What every bench shows at its end."""

from io import StringIO

from rich.console import Console

from bench.report import Report


def test_why_there_are_no_figures_stands_below_the_table_and_not_in_a_column_of_its_own() -> None:
    report, shown = Report("speed"), StringIO()
    report.add(case="even", system="ours", tokens_per_s=2000.0)
    for _ in range(2):
        report.add(
            case="even",
            system="theirs",
            skipped="it is not installed; " + "how to install it " * 20,
        )
    report.show(Console(file=shown, width=60))
    table, _, below = shown.getvalue().partition("theirs, skipped: it is not")
    assert "2,000" in table and "skipped" not in table and "install" not in table
    assert "installed" in below and "theirs, skipped" not in below
