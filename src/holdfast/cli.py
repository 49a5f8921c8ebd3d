"""The command line: `holdfast VERB PATH`. What the verbs do is in `tools`.

Exit codes: 0 good (the same), 1 a bad checkpoint (different), 2 usage and what cannot be read,
130 Ctrl-C, 143 SIGTERM (scrub), 141 when the reader of a pipe has gone.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias

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
    verbs = {"inspect": _inspect, "ls": _inspect, "verify": _verify, "diff": _diff}
    verbs |= {"sign": _sign, "convert": _convert, "recompress": _recompress, "rebase": _rebase}
    verbs |= {"repair": _repair, "scrub": _scrub, "bench": _bench}
    verbs |= {"export": _export, "import": _import}
    return verbs[chosen.verb](chosen)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="holdfast",
        description="Inspect, verify, repair, compare and convert checkpoints; benchmark a disk.",
        epilog="Example: holdfast verify runs/a. "
        "Exit codes: 0 good or the same, 1 bad or different, 2 wrong usage.",
    )
    parser.add_argument("--version", action="store_true", help="print the version, and exit")
    parser.add_argument(
        "--verbose", action="store_true", help="with --version: the machine too, for bug reports"
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    _add_inspect(verbs, "inspect", "show the contents of a checkpoint or a run")
    _add_inspect(verbs, "ls", "show the same as inspect")
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
    _add_export(verbs)
    _add_import(verbs)
    what = "convert a checkpoint of PyTorch DCP to holdfast, or back"
    convert = _add(verbs, "convert", what, "dcp/step-100 runs/a/step-00000100")
    convert.add_argument("source", metavar="SOURCE", help=f"{_ONE}, of either kind")
    convert.add_argument("target", metavar="TARGET", help="new directory for the other kind")
    convert.add_argument(
        "--pickled", action="store_true", help="keep DCP's values that are not JSON-like as pickles"
    )
    _add_codecs(verbs)
    _add_bench(verbs)
    demo = "train a small model, kill it, and resume it from its checkpoints"
    verbs.add_parser("demo", help=demo, add_help=False)
    for verb in verbs.choices.values():
        if verb.add_help:
            verb.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


_ONE, _EITHER = "directory of a checkpoint", "directory of a checkpoint or a run"
_Verbs: TypeAlias = "argparse._SubParsersAction[_Parser]"


def _add(verbs: _Verbs, name: str, what: str, example: str) -> _Parser:
    """Add a verb, whose help shows an example."""
    description = f"{what[0].upper()}{what[1:]}."
    epilog = f"Example: holdfast {name} {example}"
    return verbs.add_parser(name, help=what, description=description, epilog=epilog)


def _add_inspect(verbs: _Verbs, name: str, what: str) -> None:
    inspect = _add(verbs, name, what, "runs/a --all")
    inspect.add_argument("path", metavar="PATH", help=_EITHER)
    inspect.add_argument(
        "--all", action="store_true", help="show all names; with --json all boxes too"
    )


def _add_export(verbs: _Verbs) -> None:
    what = "write the tensors of a checkpoint as safetensors, or in another format"
    example = "runs/a/step-00000100 llama --include model --strip model. --with config-dir"
    export = _add(verbs, "export", what, example)
    export.add_argument("source", metavar="CHECKPOINT", help=_ONE)
    export.add_argument(
        "target", metavar="TARGET", help="new *.safetensors, *.pt, *.npz or directory"
    )
    export.add_argument("--to", metavar="FORMAT", help="default: by the suffix; or dcp")
    export.add_argument("--from", dest="kind", metavar="KIND", help="default: as recognised")
    for name, what in (("include", 'only these: "model", "*.weight"'), ("exclude", "not these")):
        export.add_argument(
            f"--{name}", metavar="NAMES", action="append", help=f"{what}; repeatable"
        )
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
    what = "show which tensors of a damaged checkpoint or run are whole, and save them"
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
    what = "find the fastest options for a disk; or try all codecs on a checkpoint"
    bench = _add(verbs, "bench", what, "/mnt/nvme")
    bench.add_argument("path", metavar="DIR", help="directory on the disk; its files are deleted")
    bench.add_argument(
        "--codecs", action="store_true", help="DIR is a checkpoint: try all codecs on it"
    )
    bench.add_argument(
        "base", metavar="BASE", nargs="?", help="with --codecs: checkpoint to use as the base"
    )
    bench.add_argument("--gib", type=float, default=1.0, help="GiB of elements; default: 1")
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
        raise OptionError("--public-key needs --signature; give both")
    keys = chosen.public_key or () if chosen.signature else None
    document = verify.verify(chosen.path, deep=chosen.deep, strict=chosen.strict, keys=keys)
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
        return USAGE  # 1 would say that they differ, which is unknown
    _write(chosen, document, partial(diff.render, everything=chosen.all))
    return GOOD if document["same"] else BAD


def _convert(chosen: argparse.Namespace) -> int:
    from .tools import export

    document = export.convert_any(chosen.source, chosen.target, pickled=chosen.pickled)
    _write(chosen, document, export.render)
    return GOOD


def _export(chosen: argparse.Namespace) -> int:
    from .tools import export

    _write(chosen, export.export(**_arguments(chosen)), export.render)
    return GOOD


def _import(chosen: argparse.Namespace) -> int:
    from .tools import importing

    _write(chosen, importing.import_(**_arguments(chosen)), importing.render)
    return GOOD


def _arguments(chosen: argparse.Namespace) -> dict[str, Any]:
    general = ("verb", "json", "version", "verbose")
    return {name: value for name, value in vars(chosen).items() if name not in general}


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
        raise OptionError(
            f"bench takes one directory, found {chosen.base} too. To compare two checkpoints, use "
            "--codecs CHECKPOINT BASE"
        )
    from .tools.bench import bench
    from .tools.bench_report import render

    _write(chosen, bench(chosen.path, gib=chosen.gib, rounds=chosen.rounds), render)
    return GOOD
