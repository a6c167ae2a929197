"""What is freed goes back to the system."""

import subprocess
import sys

import pytest

HOLES = """
import torch
from operators.models.loading import trim_memory
from transport.data import keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

keep_freed_memory()
blocks = [torch.ones(1 << 18) for _ in range(128)]
before = resident()
kept = blocks[1::2]
del blocks
assert before - resident() < 16 << 20, "holes between what is kept stay"
trim_memory()
assert before - resident() > 48 << 20
"""


@pytest.mark.slow
def test_holes_in_the_heap_are_given_back():
    subprocess.run([sys.executable, "-c", HOLES], check=True, timeout=120)
