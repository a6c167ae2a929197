"""What the summary of a run says, from its folder alone."""

from pathlib import Path

from dataflow.display.closing import summary_lines
from dataflow.display.formatting import ASCII
from dataflow.display.screen import text_of
from dataflow.folder.run_folder import RunFolder
from dataflow.history.summary import summarize


def test_a_run_over_hosts_says_who_was_planned_where_and_another_run_says_nothing_of_them(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "test")
    folder.write_json("config.json", {"hosts": {"prompts": ["a"], "generator": ["a", "b"], "reward": ["a"]}})
    lines = [text_of(line) for line in summary_lines(summarize(folder, "", True), ASCII)]
    assert "  hosts       prompts and reward on a, generator on a and b" in lines
    folder.write_json("config.json", {})
    assert not any(text_of(line).startswith("  hosts") for line in summary_lines(summarize(folder, "", True), ASCII))
