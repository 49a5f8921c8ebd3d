"""The arguments of the command line: verbs, options, help. What they do is in `cli.py`."""

import argparse
import re
from typing import NoReturn, TypeAlias

from ..errors import OptionError
from .guess import guess

SHELLS = ("bash", "zsh", "tcsh")
_ONE, _EITHER = "directory of a checkpoint", "directory of a checkpoint or a run"


# The help of the command has its verbs in these groups, in this order.
_GROUPS = {
    "look": ("ls", "inspect", "diff", "watch", "report"),
    "check": ("check-run", "verify", "scrub", "repair", "sign"),
    "move": ("copy", "export", "import", "convert"),
    "shrink": ("prune", "recompress", "rebase"),
    "try": ("bench", "demo", "completion"),
}
_CHOICE = re.compile(r"argument VERB: invalid choice: '(.*?)' \(choose from .*", re.DOTALL)


class _Parser(argparse.ArgumentParser):
    """Raises what argparse prints over several lines and exits with."""

    def error(self, message: str) -> NoReturn:
        if choice := _CHOICE.fullmatch(message):
            message = f"invalid choice: '{choice[1]}'.{guess(choice[1], self._verbs())}"
        elif message.startswith("unrecognized arguments: -"):
            given = message.split()[2].partition("=")[0]
            message = f"{message}.{guess(given, self._options())}"
        joint = " See" if message.endswith("?") else "; see"
        raise OptionError(f"{message.removesuffix('.')}{joint} '{self.prog} --help'")

    def format_help(self) -> str:
        """Return the help; that of the whole command has its verbs in groups."""
        helps = {
            verb.dest: str(verb.help) for a in self._verb_actions() for verb in a._choices_actions
        }
        if not helps:
            self._shorten()
            return super().format_help()
        lines = ["usage: holdfast VERB PATH   'holdfast VERB --help' shows options and an example"]
        for group, names in _GROUPS.items():
            there = [name for name in names if name in helps]
            for name in there:
                label = group if name == there[0] else ""
                lines.append(f"{label:7}  {name:11} {helps[name]}")
        lines.append("options: --version, --version --verbose; most verbs have --json")
        lines.append("exit codes: 0 good or the same, 1 bad or different, 2 wrong usage")
        return "\n".join([*lines, ""])

    def _shorten(self) -> None:
        """Let the help of a verb fit on one screen: its options are listed below the usage."""
        places = [action for action in self._actions if not action.option_strings]
        named = [f"[{a.metavar}]" if a.nargs == "?" else str(a.metavar) for a in places]
        self.usage = " ".join([self.prog, *named, "[options]"])
        for action in self._actions:
            if isinstance(action, argparse._HelpAction):
                action.help = argparse.SUPPRESS

    def _verb_actions(self) -> "list[_Verbs]":
        return [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]

    def _verbs(self) -> list[str]:
        return [name for action in self._verb_actions() for name in action.choices]

    def _options(self) -> list[str]:
        parsers = [p for action in self._verb_actions() for p in action.choices.values()]
        return [option for p in (self, *parsers) for a in p._actions for option in a.option_strings]


_Verbs: TypeAlias = "argparse._SubParsersAction[_Parser]"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(prog="holdfast")
    parser.add_argument("--version", action="store_true", help="print the version, and exit")
    parser.add_argument(
        "--verbose", action="store_true", help="with --version: the machine too, for bug reports"
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    what = "show the contents of a checkpoint or a run"
    inspect = _add(verbs, "inspect", what, "runs/a --all")
    inspect.add_argument("path", metavar="PATH", help=_EITHER)
    inspect.add_argument(
        "--all", action="store_true", help="show all names; with --json all boxes too"
    )
    inspect.add_argument("--html", metavar="FILE", help="also write a page with pictures")
    _add_runs(verbs)
    _add_report(verbs)
    verify = _add(verbs, "verify", "check every byte of a checkpoint or a run", "runs/a --deep")
    verify.add_argument("path", metavar="PATH", help=_EITHER)
    verify.add_argument(
        "--deep", action="store_true", help="also decode everything, with the bases of deltas"
    )
    verify.add_argument(
        "--strict", action="store_true", help="files that holdfast did not write are bad"
    )
    _add_signing(verbs, verify)
    _add_care(verbs)
    example = "runs/a/step-00000100 runs/a/step-00000200"
    diff = _add(verbs, "diff", "compare two checkpoints, element by element", example)
    diff.add_argument("a", metavar="A", help=_ONE)
    diff.add_argument("b", metavar="B", help="directory of another checkpoint")
    diff.add_argument("--all", action="store_true", help="show all differences")
    diff.add_argument("--html", metavar="FILE", help="also write a page with a map of the layers")
    _add_choice(diff)
    diff.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="tensors nowhere further apart than X are the same; default: to the bit",
    )
    _add_export(verbs)
    _add_import(verbs)
    _add_copy(verbs)
    what = "convert a checkpoint of PyTorch DCP to holdfast, or back"
    convert = _add(verbs, "convert", what, "dcp/step-100 runs/a/step-00000100")
    convert.add_argument("source", metavar="SOURCE", help=f"{_ONE}, of either kind")
    convert.add_argument("target", metavar="TARGET", help="new directory for the other kind")
    convert.add_argument(
        "--pickled", action="store_true", help="keep DCP's values that are not JSON-like as pickles"
    )
    _add_codecs(verbs)
    _add_bench(verbs)
    demo = "train a small model, kill it, and resume it"
    verbs.add_parser("demo", help=demo, add_help=False)
    _add_completion(verbs)
    for name, verb in verbs.choices.items():
        if verb.add_help and name not in ("watch", "completion"):
            verb.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _add(verbs: _Verbs, name: str, what: str, example: str) -> _Parser:
    """Add a verb, whose help shows an example."""
    description = f"{what[0].upper()}{what[1:]}."
    epilog = f"Example: holdfast {name} {example}"
    return verbs.add_parser(name, help=what, description=description, epilog=epilog)


def _add_runs(verbs: _Verbs) -> None:
    ls = _add(verbs, "ls", "list runs, or the steps of a run", "runs")
    where = "run, checkpoint or directory of runs; default: this directory"
    ls.add_argument("path", metavar="PATH", nargs="?", default=".", help=where)
    ls.add_argument("--all", action="store_true", help="list all steps, not those of one screen")
    watch = _add(verbs, "watch", "show a run while it trains", "runs/a")
    watch.add_argument("path", metavar="RUN", help="directory of a run")
    watch.add_argument("--once", action="store_true", help="show it once, and exit")
    check = _add(
        verbs, "check-run", "tell cron or a probe what is wrong", "runs/a --durable-min 30"
    )
    check.add_argument("path", metavar="RUN", help="directory of a run")
    for name, unit, what in (
        ("stall-s", "S", "the newest save held up training for more seconds"),
        ("durable-min", "MIN", "no step became durable for so many minutes"),
        ("straggler", "X", "a rank is X times slower than the median; default: 1.5"),
        ("disk-saves", "N", "the disk is full in fewer than N saves; default: 3"),
        ("behind-min", "MIN", "for so long no new step reached the store behind the run"),
    ):
        check.add_argument(f"--{name}", type=float, metavar=unit, help=what)
    prune = _add(
        verbs, "prune", "delete the steps that a policy does not keep", "runs/a --keep latest=3"
    )
    prune.add_argument("path", metavar="RUN", help="directory of a run that no job writes to")
    rules = "latest=3, every=1000, best=val_loss:3 or best=accuracy:3:max; repeatable"
    prune.add_argument("--keep", metavar="RULE", action="append", default=[], help=rules)
    prune.add_argument("--delete", action="store_true", help="really delete; default: only say")


def _add_completion(verbs: _Verbs) -> None:
    what = "print a script that completes verbs and options"
    completion = _add(verbs, "completion", what, "bash > ~/.holdfast-completion")
    completion.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def _add_report(verbs: _Verbs) -> None:
    what = "draw the time, the bytes and the risks of a run"
    report = _add(verbs, "report", what, "runs/a -o run.html")
    report.add_argument("path", metavar="RUN", help="directory or URL of a run")
    report.add_argument(
        "-o", dest="output", metavar="FILE", help="page to write; default: the run's name .html"
    )
    report.add_argument(
        "--trace", metavar="FILE", help="write a trace for Perfetto (ui.perfetto.dev), and no page"
    )


def _add_choice(verb: _Parser) -> None:
    for name, what in (("include", 'only these: "model", "*.weight"'), ("exclude", "not these")):
        verb.add_argument(f"--{name}", metavar="NAMES", action="append", help=f"{what}; repeatable")


def _add_export(verbs: _Verbs) -> None:
    what = "write a checkpoint as safetensors, or in another format"
    example = "runs/a/step-100 llama --include model --strip model."
    export = _add(verbs, "export", what, example)
    export.add_argument("source", metavar="CHECKPOINT", help=_ONE)
    export.add_argument(
        "target", metavar="TARGET", help="new *.safetensors, *.pt, *.npz or directory"
    )
    export.add_argument("--to", metavar="FORMAT", help="default: by the suffix; or dcp")
    export.add_argument("--from", dest="kind", metavar="KIND", help="default: as recognised")
    _add_choice(export)
    export.add_argument("--strip", metavar="PREFIX", help="take this off the names that have it")
    export.add_argument(
        "--rename", metavar="REGEX=TO", action="append", help="replace in names; repeatable"
    )
    export.add_argument("--dtype", help="convert floating-point tensors: bf16, f16, f32, …")
    export.add_argument(
        "--allow-overflow", action="store_true", help="with --dtype: let large numbers be infinite"
    )
    export.add_argument("--shard-size", metavar="SIZE", help="largest file; default: 50GB")
    export.add_argument(
        "--with", dest="files_from", metavar="DIR", help="copy config.json, tokenizer, … from DIR"
    )


def _add_import(verbs: _Verbs) -> None:
    what = "write a checkpoint of another format as one of holdfast"
    importing = _add(verbs, "import", what, "model.safetensors runs/a/first --under model")
    importing.add_argument("source", metavar="SOURCE", help="file or directory; DCP too")
    importing.add_argument("target", metavar="CHECKPOINT", help="new directory")
    importing.add_argument("--from", dest="kind", metavar="KIND", help="default: as recognised")
    importing.add_argument("--under", metavar="KEY", default="", help="put everything under a key")
    importing.add_argument("--pickled", action="store_true", help="as for convert")


def _add_copy(verbs: _Verbs) -> None:
    what = "copy a checkpoint or a run elsewhere, and check it"
    copying = _add(verbs, "copy", what, "runs/a s3://bucket/runs/a")
    copying.add_argument("source", metavar="SOURCE", help=f"{_EITHER}, or a URL")
    copying.add_argument("target", metavar="TARGET", help="new directory or URL")


def _add_codecs(verbs: _Verbs) -> None:
    what = "write a checkpoint or a run again under another codec"
    recompress = _add(verbs, "recompress", what, "runs/a runs/small --codec delta")
    recompress.add_argument("source", metavar="SOURCE", help=_EITHER)
    recompress.add_argument("target", metavar="TARGET", help="new directory")
    recompress.add_argument(
        "--codec",
        default="lossless",
        help="lossless (the default), raw, delta, delta:replay, excp, compact, or compact:tiny, "
        "compact:small, compact:balanced, compact:high",
    )
    what = "turn a delta checkpoint into a full one, in place"
    rebase = _add(verbs, "rebase", what, "runs/small/step-00000200")
    rebase.add_argument("path", metavar="PATH", help=_ONE)


def _add_care(verbs: _Verbs) -> None:
    what = "verify a run slowly, from the disk; continue if interrupted"
    scrub = _add(verbs, "scrub", what, "runs/a --mb-per-s 50")
    scrub.add_argument("path", metavar="RUN", help="directory of a run")
    scrub.add_argument(
        "--mb-per-s",
        type=float,
        default=50.0,
        help="read at most so many MB per second; 0: no limit; default: 50",
    )
    what = "show and save what is whole in a damaged checkpoint or run"
    repair = _add(verbs, "repair", what, "runs/a/step-00000100 --to runs/saved")
    repair.add_argument("path", metavar="PATH", help=_EITHER)
    do = repair.add_mutually_exclusive_group()
    do.add_argument("--write", action="store_true", help="rebuild a lost or damaged MANIFEST")
    do.add_argument("--to", metavar="NEW", help="write all whole tensors to the directory NEW")


def _add_signing(verbs: _Verbs, verify: _Parser) -> None:
    verify.add_argument(
        "--signature", action="store_true", help="check its SIGNATURE too; unsigned is bad"
    )
    verify.add_argument(
        "--public-key",
        metavar="KEY",
        action="append",
        help="with --signature: accept only signatures of this key; may be repeated",
    )
    what, example = "sign every byte of a checkpoint", "runs/a/step-00000100 --key key.pem"
    sign = _add(verbs, "sign", what, example)
    sign.add_argument("path", metavar="PATH", help=_ONE)
    sign.add_argument(
        "--key", required=True, metavar="KEY", help="file of an Ed25519 private key, PEM or OpenSSH"
    )


def _add_bench(verbs: _Verbs) -> None:
    what = "find the fastest options of a disk or bucket; or try codecs"
    bench = _add(verbs, "bench", what, "/mnt/nvme")
    bench.add_argument(
        "path", metavar="DIR", help="directory on the disk, or URL of a bucket; left as it was"
    )
    bench.add_argument(
        "--codecs", action="store_true", help="DIR is a checkpoint: try all codecs on it"
    )
    bench.add_argument(
        "base", metavar="BASE", nargs="?", help="with --codecs: checkpoint to use as the base"
    )
    bench.add_argument("--gib", type=float, default=1.0, help="GiB of elements; default: 1")
    bench.add_argument("--rounds", type=int, default=3, help="default: 3; more on a busy disk")
    bench.add_argument(
        "--seconds", type=float, default=60.0, help="for a bucket: how long, about; default: 60"
    )
