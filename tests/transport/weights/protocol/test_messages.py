"""Messages of the weight handshake survive the wire, and nothing else is taken for one."""

import subprocess
import sys


def test_layouts_and_the_handshake_import_no_torch():
    rooms = (
        "transport.weights",
        *(f"transport.weights.protocol.{each}" for each in ("rounds", "ranks", "segments")),
    )
    code = f"import sys, {', '.join(rooms)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
