"""A generator and a trainer in turns on main memory: they run where there is room for the larger
one and a tenth.
"""

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

from operators.warm_start.train import character_tokenizer

STEPS = 2
MARGIN = 1.1
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a policy of 152 million parameters with random weights: 10% of a trainer is
    more than a process.
    """
    folder, tokenizer = tmp_path_factory.mktemp("large"), character_tokenizer(ALPHABET, 64)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
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


BARE = """
import os, operators.engine.parallel.lockstep, transformers.models.llama.modeling_llama
from pathlib import Path
print(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


def bare() -> int:
    """What a rank has in memory that has read no model."""
    command = [sys.executable, "-c", BARE]
    return int(
        subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True).stdout
    )


def resident(pid: str) -> int:
    """Bytes that a process and its ranks have in memory: their own, mapped files and shared
    segments, all in full.
    """
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [each for task in tasks for each in (task / "children").read_text().split()]
    except OSError:
        return 0
    return own + sum(map(resident, children))


def watched(policy: Path, folder: Path, way: str, limit: float, ranks: int) -> Watched:
    """Run the pair, and kill it as soon as it has more than `limit` bytes together, which is looked
    at all the time.
    """
    found = Watched()
    command = [
        sys.executable,
        "-m",
        "rigs.two_in_turn",
        str(policy),
        str(folder),
        way,
        *map(str, (STEPS, ranks)),
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
        cwd=folder.parent,
    ) as program:
        while program.poll() is None:
            now = {
                each.name: resident(each.read_text() or "0") for each in (folder / "pids").glob("*")
            }
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
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pair_in_turns_runs_where_there_is_room_for_the_larger_one_and_a_tenth(
    ranks: int, large: Path, tmp_path: Path
) -> None:
    """A generator's further ranks are further interpreters, which have their libraries wherever the
    model is.
    """
    alone = watched(large, tmp_path / "alone", "apart", float("inf"), ranks)
    limit = MARGIN * max(alone.peaks.values()) + (ranks - 1) * bare()
    shared = watched(large, tmp_path / "shared", "shared", limit, ranks)
    apart = watched(large, tmp_path / "apart", "apart", limit, ranks)
    mebibytes = {
        way: {"together": each.together >> 20}
        | {name: size >> 20 for name, size in each.peaks.items()}
        for way, each in (("alone", alone), ("shared", shared), ("apart", apart))
    }
    print(json.dumps(mebibytes | {"limit": int(limit) >> 20}))
    assert alone.made is not None and alone.made["clean"]
    assert shared.made is not None and shared.made["clean"], mebibytes
    assert shared.made["tokens"] == alone.made["tokens"]
    # How many rows a forward pass holds depends on when prompts arrive, and with it the last
    # digits.
    assert shared.made["losses"] == [
        pytest.approx(step, rel=1e-5, abs=1e-8) for step in alone.made["losses"]
    ]
    assert apart.made is None and alone.together > limit, mebibytes
