"""Room for libraries that write later than they take: what a disk refuses them they lose, and do
not say so.
"""

import errno
import os
import shutil
from pathlib import Path

SPARE_BYTES = 64 << 20
"""More than such a library holds back, and another program takes in a second or two."""


def check_room(place: Path) -> None:
    """Raise OSError where the disk of a folder, which need not be there yet, has less room than
    that.
    """
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < SPARE_BYTES:
        has = (
            f"{os.strerror(errno.ENOSPC)}: {free >> 20} MiB are free, and {SPARE_BYTES >> 20} are"
            " needed"
        )
        raise OSError(errno.ENOSPC, has, str(place))
