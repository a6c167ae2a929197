"""What the summary of a run says, from its folder alone."""

import shlex
from pathlib import Path

from dataflow.display.formatting import ASCII
from dataflow.display.screen import text_of
from dataflow.display.views import summary_lines
from dataflow.folder.run_folder import RunFolder
from dataflow.history.resume import go_on_with
from dataflow.history.summary import summarize


def test_it_names_the_newest_model_of_each_trainer_and_the_page(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "test")
    folder.write_json(
        "graph.json",
        {"name": "test", "nodes": [{"name": "actor"}, {"name": "critic"}], "edges": []},
    )
    for node, steps in (("actor", (4, 10)), ("critic", (10,))):
        for step in steps:
            with folder.checkpoints_of(node).writing(step) as place:
                (place / "config.json").write_text("{}")
    said = summarize(folder, "", True)
    places = [folder.checkpoints_of(node).folder(10) for node in ("actor", "critic")]
    assert said.models == tuple(map(str, places)) and all(place.is_dir() for place in places)
    assert any(command.endswith(f"live {folder.path}") for command, _ in said.commands)


def test_commands_to_copy_name_the_folder_whatever_its_name(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "it's a folder", "test")
    commands = [command for command, _ in summarize(folder, "", True).commands]
    for verb in ("resume", "live", "verify", "show"):
        assert any(
            shlex.split(command)[-2:] == [verb, str(folder.path)]
            for command in commands
            if verb in command
        )
    assert shlex.split(go_on_with(folder, object()))[-1] == str(folder.path)


def test_a_run_over_hosts_says_who_was_planned_where_and_another_run_says_nothing_of_them(
    tmp_path: Path,
) -> None:
    folder = RunFolder.create(tmp_path, "test")
    folder.write_json(
        "config.json", {"hosts": {"prompts": ["a"], "generator": ["a", "b"], "reward": ["a"]}}
    )
    lines = [text_of(line) for line in summary_lines(summarize(folder, "", True), ASCII)]
    assert "  hosts       prompts and reward on a, generator on a and b" in lines
    folder.write_json("config.json", {})
    assert not any(
        text_of(line).startswith("  hosts")
        for line in summary_lines(summarize(folder, "", True), ASCII)
    )


def test_steps_of_a_trainer_that_writes_no_loss_are_counted(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "test")
    folder.append_metrics({"step": 0, "node": "evaluate", "eval_accuracy": 0.25})
    for step in (1, 2):
        folder.append_metrics(
            {"step": step, "node": "trainer", "rollouts": 4, "dropped": {"failed": 1}}
        )
    summary = summarize(folder, "", True)
    assert (summary.steps, summary.rollouts, summary.dropped) == (2, 8, 2)
