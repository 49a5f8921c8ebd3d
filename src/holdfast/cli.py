"""The command line: `holdfast VERB PATH`. What the verbs do is in `tools`.

Exit codes: 0 good (the same), 1 a bad checkpoint (different), 2 usage and what cannot be read,
130 Ctrl-C, 143 SIGTERM (scrub), 141 when the reader of a pipe has gone.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .errors import CorruptError, HoldfastError, NotCommittedError, OptionError, StoreError
from .version import __version__, needs

# Verbs import their module when they run: `inspect` and `verify` start without torch.

GOOD, BAD, USAGE = 0, 1, 2
INTERRUPTED = 128 + 2  # as shells report SIGINT
PIPE_CLOSED = 128 + 13  # as shells report SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code.

    Args:
        arguments: without the program's name; default: those of the process.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, such as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  as long as the process
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(given)
        sys.stdout.flush()
        return code
    except HoldfastError as error:
        return _report(error, as_json="--json" in given, given=given[1:])
    except ImportError as error:
        if error.name != "torch":
            raise
        lacking = OptionError(needs("torch", "torch", f"holdfast {given[0]}"))
        return _report(lacking, as_json="--json" in given)
    except MemoryError:
        return _report(StoreError(f"{given[0]}: out of memory"), as_json="--json" in given)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes at its end, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _report(error: HoldfastError, *, as_json: bool, given: Sequence[str] = ()) -> int:
    """Say what failed; for machines on the standard output too, where every verb answers them."""
    from .tools.text import fit, printable, screen_size, write, write_json

    if as_json:
        write_json({"error": {"type": type(error).__name__, "message": str(error)}})
    meant = ""
    if isinstance(error, (NotCommittedError, StoreError)):
        from .tools.guess import guess_path

        meant = guess_path(given, str(error))
    line = f"holdfast: {printable(str(error) + ('.' + meant if meant else ''))}"
    lines = fit([line], screen_size()[0]) if sys.stderr.isatty() else [line]
    write(sys.stderr, "".join(f"{line}\n" for line in lines))
    return BAD if isinstance(error, CorruptError) else USAGE


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["demo"]:
        from .tools.demo import main as demo

        return demo(arguments[1:])
    from .tools.parser import make_parser

    parser = make_parser()
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
    _check_places(chosen)
    verbs = {"inspect": _inspect, "ls": _ls, "verify": _verify, "diff": _diff}
    verbs |= {"watch": _watch, "check-run": _check_run, "prune": _prune}
    verbs |= {"completion": _completion}
    verbs |= {"sign": _sign, "convert": _convert, "recompress": _recompress, "rebase": _rebase}
    verbs |= {"repair": _repair, "scrub": _scrub, "bench": _bench}
    verbs |= {"report": _report_run, "export": _export, "import": _import, "copy": _copy}
    if not any(isinstance(value, str) and "://" in value for value in vars(chosen).values()):
        return verbs[chosen.verb](chosen)
    from .tools.waiting import told

    with told():
        return verbs[chosen.verb](chosen)


def _check_places(chosen: argparse.Namespace) -> None:
    """Check that no argument is a store of this process, which ends with it."""
    for value in vars(chosen).values():
        if isinstance(value, str) and value.startswith("memory://"):
            raise OptionError(
                f"{value}: a memory:// is of one process, and this command would see or leave "
                "nothing there. Use it from Python"
            )


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
    if chosen.html is not None:
        from .report.pages import write_inspected

        _say_written(write_inspected(chosen.path, chosen.html))
    _write(chosen, document, partial(inspect.render, everything=chosen.all))
    return inspect.exit_code(document)


def _say_written(path: str) -> None:
    """Say where a page is; on the standard error, as the standard output has the answer."""
    from .tools.text import printable, write

    write(sys.stderr, f"wrote {printable(path)}\n")


def _ls(chosen: argparse.Namespace) -> int:
    from .tools import ls

    document = ls.ls(chosen.path, everything=chosen.all)
    if document is None:
        return _inspect(argparse.Namespace(**vars(chosen), html=None))
    _write(chosen, document, ls.render)
    return GOOD


def _watch(chosen: argparse.Namespace) -> int:
    from .tools import watch
    from .tools.watch_screen import show

    show(partial(watch.look, chosen.path), once=chosen.once)
    return GOOD


def _check_run(chosen: argparse.Namespace) -> int:
    from .tools import check_run

    names = ("stall_s", "durable_min", "straggler", "disk_saves", "behind_min")
    found = {name: getattr(chosen, name) for name in names}
    limits = {name: value for name, value in found.items() if value is not None}
    document = check_run.check_run(chosen.path, **limits)
    _write(chosen, document, check_run.render)
    return GOOD if document["ok"] else BAD


def _prune(chosen: argparse.Namespace) -> int:
    from .tools import prune

    document = prune.prune(chosen.path, chosen.keep, delete=chosen.delete)
    _write(chosen, document, prune.render)
    return GOOD


def _completion(chosen: argparse.Namespace) -> int:
    from .tools.parser import make_parser
    from .tools.text import write_lines

    try:
        import shtab  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise OptionError(needs("shtab", "completion", "holdfast completion")) from error
    write_lines([shtab.complete(make_parser(), chosen.shell)])
    return GOOD


def _report_run(chosen: argparse.Namespace) -> int:
    from .report import verb

    document = verb.report(
        chosen.path, output=chosen.output, trace=chosen.trace, as_json=chosen.json
    )
    _write(chosen, document, verb.render)
    return verb.exit_code(document)


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
        document = diff.diff(
            chosen.a,
            chosen.b,
            include=chosen.include or (),
            exclude=chosen.exclude or (),
            tolerance=chosen.tolerance,
            with_angle=chosen.html is not None,
        )
    except CorruptError as error:
        _report(error, as_json=chosen.json)
        return USAGE  # 1 would say that they differ, which is unknown
    if chosen.html is not None:
        from .report.pages import write_difference

        _say_written(write_difference(document, chosen.html))
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


def _copy(chosen: argparse.Namespace) -> int:
    from .tools import copy

    document = copy.copy_all(chosen.source, chosen.target)
    _write(chosen, document, copy.render)
    return BAD if document["damaged"] else GOOD


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
    from .tools import bench_store

    if bench_store.measures(chosen.path):
        given = {"gib": chosen.gib, "rounds": chosen.rounds, "limit_s": chosen.seconds}
        _write(chosen, bench_store.bench_store(chosen.path, **given), bench_store.render)
        return GOOD
    from .tools.bench import bench
    from .tools.bench_report import render

    _write(chosen, bench(chosen.path, gib=chosen.gib, rounds=chosen.rounds), render)
    return GOOD
