"""The laws of a run over hosts."""

from .changes import argument, expression, instead, returned, without
from .law import Law

HOSTS = (
    Law(
        "all ranks of a replica share a host, except a large trainer's",
        "test_ranks_stay_together_where_a_row_would_cross_hosts",
        "dataflow.planning:Room.numbers",
        returned("range(self.first_gpu, self.first_gpu + 2 * self.host.gpus)", "range"),
        "the end of a host's row",
    ),
    Law(
        "an accelerator has one owner",
        "test_the_largest_unit_on_accelerators_has_its_host_first_and_others_fill_what_is_left",
        "dataflow.planning:Room.take",
        without("busy"),
        "those taken",
    ),
    Law(
        "nodes that share devices move together",
        "test_nobody_gets_between_those_who_take_turns_while_some_of_them_are_away",
        "dataflow.planning:_Seating.block",
        returned("seat.gpus", "range"),
        "the place kept for the others",
    ),
    Law(
        "no host gets more processes than its cores carry",
        "test_on_the_cpu_the_workers_of_a_lost_host_go_where_there_are_fewest_per_core",
        "dataflow.planning:_Seating._find.weighed",
        returned("(False, 0.0, at)", "load"),
        "each host's load",
    ),
    Law(
        "a scorer sits beside its neighbours",
        "test_a_light_worker_sits_where_most_of_its_neighbours_are",
        "dataflow.planning:_Seating.seat_beside",
        instead("beside = rooms[0].host.name", "max"),
        "counting neighbours",
    ),
    Law(
        "a layer is cut across hosts only if nothing else fits",
        "test_a_layer_is_cut_across_hosts_only_where_nothing_else_fits",
        "dataflow.planning:divisions.cost",
        returned("(False, False, -count)", "tensor_parallel"),
        "what ranks exchange",
    ),
    Law(
        "a worker ends if it loses ranks with a host",
        "test_it_is_killed_when_a_host_of_its_ranks_is_lost_and_starts_again_on_hosts_that_live",
        "dataflow.scheduler:lose_host",
        without("rank_hosts"),
        "looking for them",
    ),
    Law(
        "remote ranks end with their worker",
        "test_its_ranks_elsewhere_end_when_its_own_host_is_lost",
        "dataflow.scheduler.recovery:exited",
        expression("False", "is_spread"),
        "ending them",
    ),
    Law(
        "agents' messages arrive once, in order",
        "test_a_message_that_a_connection_lost_is_sent_again_as_soon_as_the_other_is_heard",
        "transport:Numbered.missing",
        returned("asks", "_kept"),
        "sending again",
    ),
    Law(
        "equal plans have equal digests on all hosts",
        "test_a_digest_does_not_hang_on_the_order_in_which_a_mapping_was_filled",
        "dataflow.planning:digest",
        argument("dumps", "sort_keys", "False"),
        "a fixed order",
    ),
    Law(
        "files of a replaced attempt do not count",
        "test_a_checkpoint_of_another_host_comes_from_its_copy_and_one_that_does_not_count_is_set_aside",
        "dataflow.folder:OwnFiles.see_newest",
        without("_set_aside"),
        "setting them aside",
    ),
    Law(
        "files of steps taken back do not count",
        "test_a_return_forgets_who_had_the_files_of_steps_that_are_taken_back",
        "dataflow.folder.ledger:BaseLedger.roll_back",
        without("_forget_places"),
        "dropping their places",
    ),
    Law(
        "a node with private files stays on their host",
        "test_who_keeps_what_no_other_host_sees_waits_for_its_own_and_others_go_elsewhere",
        "dataflow.scheduler.seating:is_bound",
        returned("False", "own_folder"),
        "waiting for the host",
    ),
    Law(
        "a late answer does not end a newer process",
        "test_an_answer_from_before_a_process_was_asked_for_says_nothing_and_another_is_asked_for",
        "dataflow.scheduler.host_agent:Questions.counts",
        returned("True", "_outdated"),
        "the question's number",
    ),
    Law(
        "a host counts as empty only by its own answer",
        "test_a_host_that_is_asked_while_it_is_cleared_is_not_taken_for_empty_before_it_is",
        "dataflow.scheduler.agents:Agents._ask",
        instead("agent.handed, agent.asked_at = {}, time.monotonic()", "is_clearing"),
        "needing that answer",
    ),
)
