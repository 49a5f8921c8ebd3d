"""Which tests `make test` leaves to `make test-all`, and why: the one place that says so.

Each name is a folder, a file or a test below `tests`, all cases of a test with it. A test belongs
here when it takes long, and when what it finds is found by something shorter as well, or by its
kind only rarely. A fault that was found stays caught by `make test` where its own test is short:
`test_errata.py` says which are not.
"""

from pathlib import Path

ROOT = Path(__file__).parent

LONG = {
    "process": "campaigns in processes of their own; unit/test_worker.py has what they found",
    "demo/test_demo.py": "torchrun starts five times",
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
    "crash/test_race.py": "sixteen processes; unit/test_commit.py has two that race",
}


def reason_of(node: str) -> str | None:
    """Return why a test is long, by its node id; None where it is not."""
    path = node.split("[")[0].removeprefix("tests/")
    return next((why for name, why in LONG.items() if _covers(name, path)), None)


def _covers(name: str, path: str) -> bool:
    return path == name or path.startswith((f"{name}/", f"{name}::"))
