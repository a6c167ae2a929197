"""A generator and a trainer in turns on main memory: they run where there is room for the larger one and a tenth."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.policy import ALPHABET
from transformers import LlamaConfig, LlamaForCausalLM

from operators.warm_start.policy import character_tokenizer

STEPS = 2
MARGIN = 1.1
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a policy of 105 million parameters with random weights."""
    folder, tokenizer = tmp_path_factory.mktemp("large"), character_tokenizer(ALPHABET, 64)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=1024, intermediate_size=4096, num_hidden_layers=7,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Watched:
    """A pair that ran under a limit."""

    made: dict[str, Any] | None = None
    """None: it was killed."""
    peaks: dict[str, int] = field(default_factory=dict)
    together: int = 0


def resident(pid: str) -> int:
    """Bytes that a process and its ranks have in memory: their own, files that they map and shared segments, in full."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = [
            each for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()
        ]
    except OSError:
        return 0
    return own + sum(map(resident, children))


def watched(policy: Path, folder: Path, way: str, limit: float, parallel: int, ranks: int) -> Watched:
    """Run the pair, and kill it as soon as it has more than `limit` bytes together, which is looked at all the time."""
    found = Watched()
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "rigs.two_in_turn",
        str(policy),
        str(folder),
        way,
        *map(str, (STEPS, parallel, ranks)),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True, cwd=folder.parent
    ) as program:
        while program.poll() is None:
            now = {each.name: resident(each.read_text() or "0") for each in (folder / "pids").glob("*")}
            found.peaks = {name: max(size, found.peaks.get(name, 0)) for name, size in now.items()}
            found.together = max(found.together, sum(now.values()))
            if sum(now.values()) > limit:
                program.send_signal(signal.SIGKILL)
                break
            time.sleep(0.005)
        output = program.communicate()[0]
    if program.returncode == 0:
        found.made = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("parallel", "ranks"), [(1, 1), (2, 1), (2, 2)])
def test_a_pair_in_turns_runs_where_there_is_room_for_the_larger_one_and_a_tenth(
    parallel: int, ranks: int, large: Path, tmp_path: Path
) -> None:
    alone = watched(large, tmp_path / "alone", "apart", float("inf"), parallel, ranks)
    limit = MARGIN * max(alone.peaks.values())
    shared = watched(large, tmp_path / "shared", "shared", limit, parallel, ranks)
    apart = watched(large, tmp_path / "apart", "apart", limit, parallel, ranks)
    mebibytes = {
        way: {"together": each.together >> 20} | {name: size >> 20 for name, size in each.peaks.items()}
        for way, each in (("alone", alone), ("shared", shared), ("apart", apart))
    }
    print(json.dumps(mebibytes | {"limit": int(limit) >> 20}))
    assert alone.made is not None and alone.made["clean"]
    assert shared.made == alone.made, mebibytes
    assert apart.made is None and alone.together > limit, mebibytes
