"""The names that the rest of the project may use."""

import subprocess
import sys

import transport.data


def test_the_exported_names_of_the_data_plane_are_these() -> None:
    assert transport.data.__all__ == [
        "AnswerSender",
        "Delivery",
        "EdgeCounts",
        "EndCounts",
        "Keys",
        "LocalInlet",
        "LocalOutlet",
        "Network",
        "Receiver",
        "Sender",
        "SocketNetwork",
        "keep_freed_memory",
        "make_keys",
    ]


def test_the_data_plane_imports_neither_torch_nor_the_engine() -> None:
    program = "import sys, transport.data; print('torch' in sys.modules, 'dataflow' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == ["False", "False"]
