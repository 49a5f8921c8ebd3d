"""Which tests `make test` leaves to `make test-all`, and why: the one place that says so.

Each name is a folder, a file or a test below `tests`, all cases of a test with it; `[1:]` after it
means all cases but the first. A test belongs here when it takes long, and when what it finds is
found by something shorter as well, or by its kind only rarely. A fault that was found stays caught
by `make test` where its own test is short: `test_errata.py` says which are not.
"""

from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent

# Many of their tests take seconds. They begin first, so that none of them is alone at the end.
SLOW = (
    "distributed",
    "crash/test_replaced.py",
    "damage/test_flips.py",
    "unit/test_chains.py",
    "unit/test_lossy.py",
    "unit/test_recode.py",
    "unit/test_replay.py",
    "unit/test_save_async.py",
    "unit/test_threads.py",
)

LONG = {
    "cli/test_cli.py::test_python_may_run_without_docstrings": "modules are compiled anew",
    "convert/test_memory.py": "gigabytes; no bit depends on it",
    "stores/test_ranks.py": "processes that import torch; make stores",
    "stores/test_chaos.py": "jobs of several processes; make stores",
    "process": "campaigns in processes of their own; unit/test_worker.py has what they found",
    "reports/test_many_steps.py::test_each_verb_answers_in_bounded_time_and_memory": (
        "processes and thousands of directories; the others there count what is asked for"
    ),
    "demo/test_demo.py": "torchrun starts five times",
    "integrations/test_clusters.py": "torchrun starts twelve times; the scripts change rarely",
    "integrations/test_dcp_examples.py::test_the_fsdp_example_trains_resumes_and_loads_on_another"
    "_layout": "torchrun starts three times",
    "integrations/test_dcp_examples.py::test_the_dcp_example_saves_and_resumes_on_two_ranks": (
        "torchrun"
    ),
    "integrations/test_dcp_install.py::test_the_environment_routes_a_program_that_knows_nothing_of"
    "_us": "a process that imports torch for each case",
    "integrations/test_dcp_install.py::test_the_environment_does_no_harm_to_programs_that_import_us"
    "_first": "a process that imports torch",
    "unit/test_ambient.py::test_what_holds_without_a_setting_holds_under_it": (
        "runs other tests again, five times"
    ),
    "integrations/test_dcp_convert.py::test_memory_does_not_grow_with_the_checkpoint": (
        "gigabytes; no bit depends on it"
    ),
    "damage/test_flips.py::test_every_flipped_bit_fails_a_load": (
        "every bit, one load each; damage/test_campaign.py takes bits of all codecs at random"
    ),
    "unit/test_codec_properties.py::test_what_comes_back": (
        "values at random; the tests of each codec have those that were hard"
    ),
    "crash/test_background_faults.py": "jobs that are struck; make strike",
    "crash/test_kill.py": "hundreds of processes; test_crash_states.py has every state they leave",
    "crash/test_chaos.py": "jobs of several processes; make chaos",
    "crash/test_block_states.py": "real file systems on block devices; make crash-blocks",
    "crash/test_nfs.py": "boots User-Mode Linux for each version of NFS; make nfs",
    "crash/test_race.py": "sixteen processes; unit/test_commit.py has two that race",
    "simulation/test_simulation.py::test_every_promise_holds_in_more_worlds": (
        "worlds of other seeds; make simulate has more still"
    ),
    "simulation/test_simulation.py::test_a_planted_fault_is_noticed": (
        "thousands of worlds for some; crash/test_planted_faults.py plants faults in crash states"
    ),
    "damage/test_flips.py::test_every_flipped_bit_is_reported_by_verify": (
        "every bit, one verify each; damage/test_campaign.py takes bits at random"
    ),
    "distributed/test_dcp_sharded.py::test_a_sharded_state_dict_comes_back_as_from_dcp[1:]": (
        "FSDP1 wrapped in processes of its own, for each form of its state dict"
    ),
    "distributed/test_flat.py::test_what_flat_parameters_hold_is_saved_as_of_the_plain_model[1:]": (
        "a wrapping of FSDP1 for each case; they share one way of laying parameters out"
    ),
    "distributed/test_flat.py::test_flat_parameters_load_what_the_plain_model_has_saved[1:]": (
        "as the saves"
    ),
    "distributed/test_reshard.py::test_meshes_of_two_dimensions_reshard[1:]": (
        "unit/test_shard_layouts.py has the boxes of all meshes"
    ),
    "distributed/test_reshard.py::test_strided_shards_of_several_boxes[1:]": (
        "unit/test_shard_layouts.py has the boxes"
    ),
    "distributed/test_stages.py::test_stages_with_experts_load_on_any_number_of_stages[1:]": (
        "numbers of ranks; the first case has stages and experts"
    ),
    "distributed/test_tiers.py::test_all_ranks_name_the_steps_that_were_found_on_any_host[1:]": (
        "jobs of four processes, for each layout of hosts"
    ),
    "distributed/test_tiers.py::test_a_step_goes_up_from_the_disks_of_all_hosts[1:]": "as these",
    "distributed/test_tiers.py::test_what_hosts_have_goes_up_wherever_rank_0_is_then[1:]": (
        "as these"
    ),
    "distributed/test_tiers.py::test_no_rank_names_a_step_that_another_job_has_left_behind[1:]": (
        "as these"
    ),
    "distributed/test_tiers.py::test_no_rank_names_a_step_of_which_a_host_is_gone[1:]": "as these",
    "distributed/test_dcp_suite.py": "the whole suite of DCP's behaviours; make dcp-suite",
    "crash/test_faulty_repairs.py::test_a_kill_after_any_change_harms_nothing[1:]": (
        "a kill after every change, of each kind of repair"
    ),
    "crash/test_replaced.py::test_a_replace_on_a_full_or_broken_disk_leaves_the_old_one_or_the_new"
    "[1:]": "every call of a replace fails once, a kind of fault each",
    "crash/test_replaced.py::test_a_replace_of_what_is_retired_is_whole_or_not_there[1:]": (
        "each stop; the first case takes one of six"
    ),
    "crash/test_replaced.py::test_what_is_swept_during_a_replace_is_never_the_winner[1:]": (
        "each stop; the first case takes one of six"
    ),
    "crash/test_replaced.py::test_of_two_that_replace_the_last_one_stands[1:]": "more stops",
    "crash/test_replaced.py::test_a_delta_of_what_is_replaced_is_whole_or_not_there[1:]": (
        "each stop; the first case takes one of six"
    ),
    "crash/test_bases_let_go.py::test_a_link_whose_base_is_let_go_is_whole_or_not_there[1:]": (
        "each stop; the first case takes one of five"
    ),
    "crash/test_tiers.py::test_what_each_tier_has_acknowledged_survives_kills": (
        "jobs of several processes; make crash-tiers"
    ),
    "convert/test_export.py::test_a_killed_export_leaves_nothing_that_looks_like_a_result": (
        "a process for each kill; make exports"
    ),
    "convert/test_archives.py::test_archives_of_more_than_32_bits[1:]": "70,000 tensors",
    "convert/test_torch_file.py::test_many_records_are_read": "70,000 tensors",
    "reports/test_page.py::test_a_thousand_saves_of_256_ranks_open_quickly": "120 MB of metrics",
    "convert/test_torch_file.py::test_memory_does_not_grow_with_the_file": "as convert/test_memory",
    "damage/test_flips.py::test_a_flipped_bit_is_found_in_a_payload_of_any_mode": (
        "every byte of a payload; damage/test_campaign.py takes bits of all codecs at random"
    ),
    "unit/test_chains.py::test_a_fault_of_the_disk_spoils_no_link[1:]": "a kind of fault each",
    "unit/test_chains.py::test_chains_of_twenty_links_are_cut_anew_for_each": (
        "forty saves; shorter chains have all that can differ"
    ),
    "unit/test_recode.py::test_a_rebase_that_fails_leaves_a_good_link[1:]": "a fault each",
    "unit/test_replay.py::test_steps_one_after_the_other[1:]": (
        "settings of AdamW; each is computed again in Python"
    ),
    "unit/test_lossy.py::test_weights_that_keep_their_rounding[1:]": "as the replays",
    "unit/test_save_async.py::test_random_changes_after_staging_reach_no_file[1:]": (
        "at random; make lazy has more"
    ),
    "unit/test_lossy.py::test_a_run_of_links[1:]": "runs of links, a codec each",
    "unit/test_threads.py::test_a_daemon_thread_that_is_cut_off_by_the_end_of_python_does_not_abort"
    "_it[1:]": "many processes that import torch",
    "unit/test_fork.py::test_a_child_forked_during_lazy_saves_saves_and_loads[1:]": "more forks",
    "unit/test_fork.py::test_a_child_forked_during_lazy_saves_saves_lazily[1:]": "more forks",
    "unit/test_fork.py::test_a_child_forked_while_links_are_kept_saves_links[1:]": "more forks",
    "unit/test_threads.py::test_what_is_saved_when_python_ends_is_durable[1:]": (
        "a process that imports torch for each case"
    ),
    "integrations/test_dcp_install.py::test_the_environment_sets_the_options_of_install": (
        "processes that import torch; what install does is tested in one"
    ),
    "test_examples.py::test_a_run_rolls_back_leaves_out_the_bad_data_and_is_evaluated": (
        "an example of a page, run as users do; its parts have tests"
    ),
    "test_examples.py::test_a_killed_run_resumes_as_if_it_had_not_been_killed": (
        "an example of a page, run as users do; crash/ kills in every place"
    ),
}
CASES_AFTER_THE_FIRST = "[1:]"


def reason_of(node: str, is_first_case: bool = False) -> str | None:
    """Return why a test is long, by its node id; None where it is not.

    ``is_first_case``: of a test with cases, it is the first, which `make test` may keep.
    """
    return _reason(node.split("[")[0].removeprefix("tests/"), is_first_case)


@cache
def _reason(path: str, is_first_case: bool) -> str | None:
    return next((why for name, why in LONG.items() if _covers(name, path, is_first_case)), None)


def is_slow(node: str) -> bool:
    """Return whether a test is of those that begin first, by its node id."""
    return _is_slow(node.split("[")[0].removeprefix("tests/"))


@cache
def _is_slow(path: str) -> bool:
    return any(_covers(name, path, is_first_case=False) for name in SLOW)


def _covers(name: str, path: str, is_first_case: bool) -> bool:
    if name.endswith(CASES_AFTER_THE_FIRST):
        return path == name.removesuffix(CASES_AFTER_THE_FIRST) and not is_first_case
    return path == name or path.startswith((f"{name}/", f"{name}::"))
