"""Whether the process that has started the keeper of a run's trackers still leads that run."""

import os
from collections.abc import Callable

from dataflow.folder.run_folder import RunFolder
from dataflow.folder.socket_folder import CONTROL


class RunProcess:
    """The scheduler whose keeper this is, as that sees it."""

    def __init__(self, folder: RunFolder, pid: int, parent: Callable[[], int] = os.getppid) -> None:
        """parent: of this process, as the kernel has it."""
        self._folder, self._pid, self._parent = folder, pid, parent
        self._has_led = False

    @property
    def is_there(self) -> bool:
        """Whether it lives, and none has taken its place: a standby does that too where it is only
        stopped, and has the same trackers kept by another process, which waits for these to end.
        """
        if self._parent() != self._pid:
            return False
        leads = self._folder.read_json(CONTROL, {"pid": int}).get("pid")
        # until then the one before it may stand there
        self._has_led = self._has_led or leads == self._pid
        return not self._has_led or leads in (None, self._pid)
