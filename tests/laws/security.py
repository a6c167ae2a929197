"""The laws of who may speak to a run, and of what bytes may become."""

from .changes import (
    always,
    argument,
    assigned,
    both,
    condition,
    imports,
    lacking,
    never,
    returned,
    without,
)
from .law import Law

PAIR = 'b"Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID", b"D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"'
"""One of CURVE's own examples, which everybody knows."""

SECURITY = (
    Law(
        "no pickle on any wire",
        "test_nothing_in_the_tree_makes_code_or_objects_of_bytes",
        "transport:decode_batch",
        imports("pickle"),
        "frames without pickle",
    ),
    Law(
        "no pickle on any wire",
        "test_nothing_is_pickled_and_no_tensor_file_runs_code",
        "transport:decode_batch",
        imports("pickle"),
        "the same, by imports",
    ),
    Law(
        "weights are read from safetensors alone",
        "test_weights_are_read_from_safetensors_alone",
        "operators:_loaded_at_once",
        argument("from_pretrained", "use_safetensors", "None"),
        "the requirement",
    ),
    Law(
        "a model's own code is off by default",
        "test_a_models_own_code_is_off_unless_it_is_asked_for",
        "dataflow.model:Model",
        assigned("trust_remote_code", "field(default=True, kw_only=True)"),
        "the default",
    ),
    Law(
        "sockets are ipc in a 0700 folder (data)",
        "test_an_ipc_folder_open_to_others_is_refused",
        "transport:_check_ipc",
        never("getuid"),
        "checking the mode",
    ),
    Law(
        "sockets are ipc in a 0700 folder (weights)",
        "test_a_folder_that_others_can_enter_is_refused",
        "transport.weights.executors:checked",
        condition("mode is None", "mode", "or"),
        "checking the mode",
    ),
    Law(
        "sockets bind to loopback (weights)",
        "test_an_address_that_others_could_reach_is_refused",
        "transport.weights.executors:checked",
        lacking("hostname", "127.0.0.1"),
        "checking the host",
    ),
    Law(
        "other addresses need CURVE keys",
        "test_an_address_open_to_other_machines_needs_keys",
        "transport:check_address",
        never("_is_loopback"),
        "requiring keys",
    ),
    Law(
        "only the run's keys open a channel",
        "test_a_sender_with_a_key_of_its_own_is_refused",
        "transport:Guard.callback",
        returned("True"),
        "comparing keys",
    ),
    Law(
        "only the run's keys open a weight line",
        "test_whoever_has_other_keys_is_not_heard_and_holds_nobody_up",
        "transport.weights.executors:HostAddress.bound",
        without("protect"),
        "requiring keys",
    ),
    Law(
        "each run has new keys",
        "test_a_run_has_keys_of_its_own_where_it_listens_and_none_elsewhere",
        "transport:RunKeys.make",
        both(assigned("receiver_public", PAIR), assigned("sender_public", PAIR)),
        "their being new",
    ),
    Law(
        "a message has a size limit",
        "test_a_monstrous_frame_is_cut_off_before_it_takes_memory",
        "transport:SocketListener.__init__",
        without("MAXMSGSIZE"),
        "the limit",
    ),
    Law(
        "a model's text cannot act on a page",
        "test_what_models_prompts_scorers_and_errors_say_is_text",
        "dataflow.runs.texts:visible",
        argument("map", 0, "str"),
        "control characters",
    ),
    Law(
        "the live page needs its token",
        "test_without_the_whole_token_there_is_nothing",
        "dataflow.live:admit",
        never("compare_digest"),
        "comparing it",
    ),
    Law(
        "the live page answers no other site",
        "test_another_site_is_refused_though_it_has_the_token",
        "dataflow.live:admit",
        never("_is_from_elsewhere"),
        "checking the origin",
    ),
    Law(
        "only shapes of a foreign drawing are kept",
        "test_of_a_drawing_from_anybody_only_shapes_and_texts_are_left",
        "dataflow.runs:_shape",
        always("TAGS"),
        "choosing elements",
    ),
)
