"""The command line: `holdfast VERB PATH`. What the verbs do is in `tools`.

Exit codes: 0 good (the same), 1 a bad checkpoint (different), 2 usage and what cannot be read,
130 Ctrl-C, 143 SIGTERM (scrub), 141 when the reader of a pipe has gone.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from .errors import CorruptError, HoldfastError, OptionError
from .version import __version__, needs

# Verbs import their module when they run: `inspect` and `verify` start without torch.

GOOD, BAD, USAGE = 0, 1, 2
INTERRUPTED = 128 + 2  # as shells report SIGINT
PIPE_CLOSED = 128 + 13  # as shells report SIGPIPE


class _Parser(argparse.ArgumentParser):
    """Raises what argparse prints over several lines and exits with."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see '{self.prog} --help'")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code.

    Args:
        arguments: without the program's name; default: those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(given)
        sys.stdout.flush()
        return code
    except HoldfastError as error:
        return _report(error, as_json="--json" in given)
    except ImportError as error:
        if error.name != "torch":
            raise
        lacking = OptionError(needs("torch", "torch", f"holdfast {given[0]}"))
        return _report(lacking, as_json="--json" in given)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes at its end, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _report(error: HoldfastError, *, as_json: bool) -> int:
    """Say what failed; for machines on the standard output too, where every verb answers them."""
    from .tools.text import printable, write, write_json

    if as_json:
        write_json({"error": {"type": type(error).__name__, "message": str(error)}})
    write(sys.stderr, f"holdfast: {printable(str(error))}\n")
    return BAD if isinstance(error, CorruptError) else USAGE


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["demo"]:
        from .tools.demo import main as demo

        return demo(arguments[1:])
    parser = _make_parser()
    try:
        chosen = parser.parse_args(arguments)
    except SystemExit as stop:  # after --help and --version
        return int(stop.code or 0)
    if chosen.version:
        _write_version(verbose=chosen.verbose)
        return GOOD
    if chosen.verb is None:
        parser.print_help()
        return USAGE
    verbs = {"inspect": _inspect, "verify": _verify, "diff": _diff, "bench": _bench}
    verbs |= {"sign": _sign, "convert": _convert, "recompress": _recompress, "rebase": _rebase}
    verbs |= {"repair": _repair, "scrub": _scrub}
    return verbs[chosen.verb](chosen)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="holdfast",
        description="Look at checkpoints, check, compare, convert them; measure a disk for them.",
        epilog="Exit codes: 0 good or the same, 1 bad or different, 2 usage.",
    )
    parser.add_argument("--version", action="store_true", help="print the version, and exit")
    parser.add_argument(
        "--verbose", action="store_true", help="with --version: the machine too, for bug reports"
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    inspect = verbs.add_parser("inspect", help="what is in a checkpoint or a run")
    inspect.add_argument("path", metavar="PATH", help="directory of a checkpoint, or of a run")
    inspect.add_argument(
        "--all", action="store_true", help="all names, one by one; with --json all boxes too"
    )
    verify = verbs.add_parser("verify", help="check every byte of a checkpoint or a run")
    verify.add_argument("path", metavar="PATH", help="directory of a checkpoint, or of a run")
    verify.add_argument(
        "--deep", action="store_true", help="decode everything too, through the bases of links"
    )
    _add_signing(verbs, verify)
    _add_care(verbs)
    diff = verbs.add_parser("diff", help="compare two checkpoints, element by element")
    diff.add_argument("a", metavar="A", help="directory of a checkpoint")
    diff.add_argument("b", metavar="B", help="directory of another")
    diff.add_argument("--all", action="store_true", help="all differences, however many")
    convert = verbs.add_parser("convert", help="PyTorch DCP's own checkpoint into ours, or back")
    convert.add_argument("source", metavar="SOURCE", help="directory of a checkpoint, either kind")
    convert.add_argument("target", metavar="TARGET", help="new directory for the other kind")
    convert.add_argument(
        "--pickled", action="store_true", help="keep DCP's values that are not JSON-like as pickles"
    )
    recompress = verbs.add_parser("recompress", help="write it again under another codec")
    recompress.add_argument("source", metavar="SOURCE", help="directory of a checkpoint or a run")
    recompress.add_argument("target", metavar="TARGET", help="new directory")
    recompress.add_argument(
        "--codec",
        default="lossless",
        help="lossless (the default), raw, delta, delta:replay, excp, compact, compact:tiny, … "
        "compact:high",
    )
    rebase = verbs.add_parser("rebase", help="make a link of a chain need no other checkpoint")
    rebase.add_argument("path", metavar="PATH", help="directory of a checkpoint")
    _add_bench(verbs)
    verbs.add_parser("demo", help="a training run that is killed and goes on", add_help=False)
    for verb in verbs.choices.values():
        if verb.add_help:
            verb.add_argument("--json", action="store_true", help="for machines, with full names")
    return parser


def _add_care(verbs: "argparse._SubParsersAction[_Parser]") -> None:
    scrub = verbs.add_parser("scrub", help="verify a run slowly, from the disk; goes on if stopped")
    scrub.add_argument("path", metavar="RUN", help="directory of a run")
    scrub.add_argument(
        "--mb-per-s",
        type=float,
        default=50.0,
        help="read at most so much; 0: no limit; default: 50",
    )
    repair = verbs.add_parser("repair", help="what a damaged checkpoint or run still offers")
    repair.add_argument("path", metavar="PATH", help="directory of a checkpoint, or of a run")
    do = repair.add_mutually_exclusive_group()
    do.add_argument("--write", action="store_true", help="rebuild a lost or damaged MANIFEST")
    do.add_argument("--to", metavar="NEW", help="write all tensors that are whole to NEW")


def _add_signing(verbs: "argparse._SubParsersAction[_Parser]", verify: _Parser) -> None:
    verify.add_argument(
        "--signature", action="store_true", help="its SIGNATURE too; what has none is bad"
    )
    verify.add_argument(
        "--public-key",
        metavar="KEY",
        action="append",
        help="with --signature: this key has to have signed it; may be repeated",
    )
    sign = verbs.add_parser("sign", help="sign every byte of a checkpoint with a key")
    sign.add_argument("path", metavar="PATH", help="directory of a checkpoint")
    sign.add_argument(
        "--key", required=True, metavar="KEY", help="file of an Ed25519 private key, PEM or OpenSSH"
    )


def _add_bench(verbs: "argparse._SubParsersAction[_Parser]") -> None:
    bench = verbs.add_parser(
        "bench", help="which settings are fastest on a disk; what codecs make of a checkpoint"
    )
    bench.add_argument("path", metavar="DIR", help="on the disk; what is written is removed")
    bench.add_argument(
        "--codecs", action="store_true", help="DIR is a checkpoint: say what each codec makes of it"
    )
    bench.add_argument(
        "base", metavar="BASE", nargs="?", help="with --codecs: the checkpoint to make links from"
    )
    bench.add_argument("--gib", type=float, default=1.0, help="of elements; default: 1")
    bench.add_argument("--rounds", type=int, default=3, help="default: 3; more on a busy disk")


def _write_version(*, verbose: bool) -> None:
    from .tools.text import write_lines

    if not verbose:
        write_lines([f"holdfast {__version__}"])
        return
    from .tools import about

    write_lines(about.render(about.about(".")))


def _write(
    chosen: argparse.Namespace, document: Any, render: Callable[[Any], Sequence[str]]
) -> None:
    from .tools.text import write_json, write_lines

    if chosen.json:
        write_json(document)
    else:
        write_lines(render(document))


def _inspect(chosen: argparse.Namespace) -> int:
    from .tools import inspect

    document = inspect.inspect(chosen.path, everything=chosen.all)
    _write(chosen, document, partial(inspect.render, everything=chosen.all))
    return inspect.exit_code(document)


def _verify(chosen: argparse.Namespace) -> int:
    from .tools import verify

    if chosen.public_key and not chosen.signature:
        raise OptionError("--public-key is of a signature; give --signature with it")
    keys = chosen.public_key or () if chosen.signature else None
    document = verify.verify(chosen.path, deep=chosen.deep, keys=keys)
    _write(chosen, document, verify.render)
    return verify.exit_code(document)


def _scrub(chosen: argparse.Namespace) -> int:
    from .tools import scrub

    try:
        document = scrub.scrub(chosen.path, mb_per_s=chosen.mb_per_s)
    except scrub.Terminated:
        return scrub.TERMINATED
    _write(chosen, document, scrub.render)
    return scrub.exit_code(document)


def _repair(chosen: argparse.Namespace) -> int:
    from .tools import repair

    document = repair.repair(chosen.path, to=chosen.to, write=chosen.write)
    _write(chosen, document, repair.render)
    return repair.exit_code(document)


def _sign(chosen: argparse.Namespace) -> int:
    from .tools import sign

    _write(chosen, sign.sign(chosen.path, chosen.key), sign.render)
    return GOOD


def _diff(chosen: argparse.Namespace) -> int:
    from .tools import diff

    try:
        document = diff.diff(chosen.a, chosen.b)
    except CorruptError as error:
        _report(error, as_json=chosen.json)
        return USAGE  # 1 would say that they differ, which nobody knows
    _write(chosen, document, partial(diff.render, everything=chosen.all))
    return GOOD if document["same"] else BAD


def _convert(chosen: argparse.Namespace) -> int:
    from .tools import convert

    document = convert.convert(chosen.source, chosen.target, pickled=chosen.pickled)
    _write(chosen, document, convert.render)
    return GOOD


def _recompress(chosen: argparse.Namespace) -> int:
    from .tools import recompress

    document = recompress.recompress_all(chosen.source, chosen.target, chosen.codec)
    _write(chosen, document, recompress.render_recompress)
    return BAD if document["damaged"] else GOOD


def _rebase(chosen: argparse.Namespace) -> int:
    from .tools import recompress

    _write(chosen, recompress.rebase_one(chosen.path), recompress.render_rebase)
    return GOOD


def _bench(chosen: argparse.Namespace) -> int:
    if chosen.codecs:
        from .tools import bench_codecs

        document = bench_codecs.bench_codecs(chosen.path, chosen.base, gib=chosen.gib)
        _write(chosen, document, bench_codecs.render)
        return GOOD
    if chosen.base is not None:
        raise OptionError(f"bench has two directories, and no --codecs; {chosen.base} is one more")
    from .tools.bench import bench
    from .tools.bench_report import render

    _write(chosen, bench(chosen.path, gib=chosen.gib, rounds=chosen.rounds), render)
    return GOOD
