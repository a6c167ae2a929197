"""Does one thing at an address: python -m dataflow.folder.copies JSON FD, started by
`taking.ask`.
"""

import json
import os
import sys

from dataflow.folder.copies.store_process import answer


def main() -> None:
    """The process ends at once when that is done, whatever threads a file system's client has."""
    asked = json.loads(sys.argv[1])
    os._exit(answer(asked.pop("do"), asked, int(sys.argv[2])))


if __name__ == "__main__":
    main()
