"""All cases, by the names that `nfs_play.py` takes."""

from . import looks, ranks, replies
from .lab import Case

CASES: dict[str, Case] = {
    "ways of writing": replies.ways_of_writing,
    "looks": looks.look_anywhere,
    "a new step": looks.a_new_step,
    "a replaced checkpoint": looks.a_replaced_checkpoint,
    "a checkpoint that goes": looks.a_checkpoint_that_goes,
    "an open file": looks.an_open_file,
    "lost replies of a commit": replies.lost_replies_of_a_commit,
    "any lost reply": replies.any_lost_reply,
    "a race for one step": ranks.a_race_for_one_step,
    "a race for a run": ranks.a_race_for_a_run,
    "an older job": ranks.an_older_job,
    "two ranks": ranks.two_ranks_save,
    "killed ranks": ranks.killed_ranks,
    "a server that restarts": ranks.a_server_that_restarts,
    "a soft mount": replies.a_soft_mount,
}
