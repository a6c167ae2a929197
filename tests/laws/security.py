"""The laws of who may speak to a run, and of what bytes may become."""

from .law import Law

FRAMES, KEYS = "transport/data/frames.py", "transport/data/security.py"
SOCKETS, WEIGHTS = "tests/transport/data/test_sockets.py", "tests/transport/weights"

SECURITY = (
    Law(
        "no pickle on any wire, anywhere",
        "tests/test_security.py::test_nothing_in_the_tree_makes_code_or_objects_of_bytes",
        FRAMES,
        "import struct\nimport typing\n",
        "import pickle as pickle\nimport struct\nimport typing\n",
        "that frames know no pickle",
    ),
    Law(
        "no pickle on any wire, anywhere",
        "tests/test_architecture.py::test_nothing_is_pickled_and_no_tensor_file_runs_code",
        FRAMES,
        "import struct\nimport typing\n",
        "import pickle as pickle\nimport struct\nimport typing\n",
        "the same, told by the imports",
    ),
    Law(
        "weights are read from safetensors alone",
        "tests/test_security.py::test_weights_are_read_from_safetensors_alone",
        "operators/models/loading.py",
        "use_safetensors=True,",
        "use_safetensors=None,",
        "the demand",
    ),
    Law(
        "a model's own code is off unless it is asked for",
        "tests/test_security.py::test_a_models_own_code_is_off_unless_it_is_asked_for",
        "dataflow/model.py",
        "trust_remote_code: bool = field(default=False, kw_only=True)",
        "trust_remote_code: bool = field(default=True, kw_only=True)",
        "the default",
    ),
    Law(
        "sockets bind to ipc in a 0700 folder (data)",
        f"{SOCKETS}::test_an_ipc_folder_open_to_others_is_refused",
        KEYS,
        "if mode & 0o077 or found.st_uid != os.getuid():",
        "if False:",
        "the look at the folder's mode",
    ),
    Law(
        "sockets bind to ipc in a 0700 folder (weights)",
        f"{WEIGHTS}/executors/test_shared_memory.py::test_a_folder_that_others_can_enter_is_refused",
        "transport/weights/executors/address.py",
        "if mode is None or mode & 0o077:",
        "if mode is None:",
        "the look at the folder's mode",
    ),
    Law(
        "sockets bind to loopback (weights)",
        f"{WEIGHTS}/executors/test_shared_memory.py::test_an_address_that_others_could_reach_is_refused",
        "transport/weights/executors/address.py",
        'parts.hostname in ("127.0.0.1", "localhost", "::1") and parts.port',
        "parts.port",
        "the look at the host",
    ),
    Law(
        "another address needs CURVE keys",
        f"{SOCKETS}::test_an_address_open_to_other_machines_needs_keys",
        KEYS,
        "if keys is None and not _is_loopback(host):",
        "if False:",
        "the demand for keys",
    ),
    Law(
        "only the run's keys open a channel",
        f"{SOCKETS}::test_a_sender_with_a_key_of_its_own_is_refused",
        KEYS,
        "return key == self._keys.sender_public",
        "return True",
        "the comparison of keys",
    ),
    Law(
        "the scheduler makes keys for each run",
        "tests/runs/test_listening_runs.py::test_a_run_has_keys_of_its_own_where_it_listens_and_none_elsewhere",
        KEYS,
        "        receiver_public, receiver_secret = zmq.curve_keypair()\n"
        "        sender_public, sender_secret = zmq.curve_keypair()\n",
        "        receiver_public, receiver_secret = sender_public, sender_secret = (\n"
        '            b"Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID", b"D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"\n'
        "        )\n",
        "that they are new",
    ),
    Law(
        "a message has a cap",
        f"{SOCKETS}::test_a_monstrous_frame_is_cut_off_before_it_takes_memory",
        "transport/data/sockets.py",
        "        self._socket.set(zmq.MAXMSGSIZE, 2 * max_message_bytes + frames.MAX_HEADER_BYTES)\n",
        "",
        "the cap",
    ),
)
