"""What launchers are given in tests."""

from dataflow.history.launch import Launch
from dataflow.launchers.launcher import Joining
from dataflow.system.security import RunKeys

JOIN = Joining(
    address="tcp://127.0.0.1:1",
    keys=RunKeys.make().to_bytes(),
    keys_file="/run/keys",
    launch=Launch(module="graphs.sorting", folder="/"),
    folder="/dev/null/run",
)
