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
        "no pickle on any wire, anywhere",
        "test_nothing_in_the_tree_makes_code_or_objects_of_bytes",
        "transport:decode_batch",
        imports("pickle"),
        "that frames know no pickle",
    ),
    Law(
        "no pickle on any wire, anywhere",
        "test_nothing_is_pickled_and_no_tensor_file_runs_code",
        "transport:decode_batch",
        imports("pickle"),
        "the same, told by the imports",
    ),
    Law(
        "weights are read from safetensors alone",
        "test_weights_are_read_from_safetensors_alone",
        "operators:_loaded_at_once",
        argument("from_pretrained", "use_safetensors", "None"),
        "the demand",
    ),
    Law(
        "a model's own code is off unless it is asked for",
        "test_a_models_own_code_is_off_unless_it_is_asked_for",
        "dataflow.model:Model",
        assigned("trust_remote_code", "field(default=True, kw_only=True)"),
        "the default",
    ),
    Law(
        "sockets bind to ipc in a 0700 folder (data)",
        "test_an_ipc_folder_open_to_others_is_refused",
        "transport:_check_ipc",
        never("getuid"),
        "the look at the folder's mode",
    ),
    Law(
        "sockets bind to ipc in a 0700 folder (weights)",
        "test_a_folder_that_others_can_enter_is_refused",
        "transport.weights.executors:checked",
        condition("mode is None", "mode", "or"),
        "the look at the folder's mode",
    ),
    Law(
        "sockets bind to loopback (weights)",
        "test_an_address_that_others_could_reach_is_refused",
        "transport.weights.executors:checked",
        lacking("hostname", "127.0.0.1"),
        "the look at the host",
    ),
    Law(
        "another address needs CURVE keys",
        "test_an_address_open_to_other_machines_needs_keys",
        "transport:check_address",
        never("_is_loopback"),
        "the demand for keys",
    ),
    Law(
        "only the run's keys open a channel",
        "test_a_sender_with_a_key_of_its_own_is_refused",
        "transport:Guard.callback",
        returned("True"),
        "the comparison of keys",
    ),
    Law(
        "only the run's keys open a weight line between hosts",
        "test_whoever_has_other_keys_is_not_heard_and_holds_nobody_up",
        "transport.weights.executors:HostAddress.bound",
        without("protect"),
        "the demand for keys",
    ),
    Law(
        "the scheduler makes keys for each run",
        "test_a_run_has_keys_of_its_own_where_it_listens_and_none_elsewhere",
        "transport:RunKeys.make",
        both(assigned("receiver_public", PAIR), assigned("sender_public", PAIR)),
        "that they are new",
    ),
    Law(
        "a message has a cap",
        "test_a_monstrous_frame_is_cut_off_before_it_takes_memory",
        "transport:SocketListener.__init__",
        without("MAXMSGSIZE"),
        "the cap",
    ),
    Law(
        "what a model writes acts on no page that is sent",
        "test_what_models_prompts_scorers_and_errors_say_is_text",
        "dataflow.runs.texts:visible",
        argument("map", 0, "str"),
        "the signs that act",
    ),
    Law(
        "without its token the live page is nothing",
        "test_without_the_whole_token_there_is_nothing",
        "dataflow.live:admit",
        never("compare_digest"),
        "the comparison",
    ),
    Law(
        "the live page answers no other site",
        "test_another_site_is_refused_though_it_has_the_token",
        "dataflow.live:admit",
        never("_is_from_elsewhere"),
        "the look at who asks",
    ),
    Law(
        "of a drawing from anybody only shapes are left",
        "test_of_a_drawing_from_anybody_only_shapes_and_texts_are_left",
        "dataflow.live:_shape",
        always("TAGS"),
        "the choice of elements",
    ),
)
