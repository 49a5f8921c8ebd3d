"""`holdfast bench`: who wins by given seconds, one screen, and nothing left behind."""

import contextlib
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import Options
from holdfast.errors import OptionError
from holdfast.options import STREAM_BYTES
from holdfast.tools import bench_contenders, bench_disk
from holdfast.tools.bench_contenders import Fio, Holdfast, Plain, grid, make_state
from holdfast.tools.bench_report import Document, Figures, conclude, render

from .conftest import Answer, Command, let_everybody_in, start_python

NewPath = Callable[[], Path]

GB = 10**9
DEFAULT = Options(io="io_uring")
DEEP = Options(io="io_uring", block_bytes=8 << 20, queue_depth=32)
SMALL = ("--gib", "0.02", "--rounds", "1")

# Forbids io_uring_setup (425 on every architecture) as containers do: EPERM.
WITHOUT_IO_URING = """
import ctypes, struct, sys
filters = b"".join(struct.pack("HBBI", *line) for line in (
    (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000),
))
program = ctypes.create_string_buffer(filters)
prog = struct.pack("HxxxxxxP", len(filters) // 8, ctypes.addressof(program))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.create_string_buffer(prog), 0, 0) == 0, ctypes.get_errno()
from holdfast.cli import main
sys.exit(main())
"""


@pytest.fixture
def place(new_path: NewPath) -> Path:
    place = new_path()
    place.mkdir()
    return place


@contextlib.contextmanager
def at_most(what: int, limit: int) -> Iterator[None]:
    """Keep this process from something, for real, as long as the block lasts."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def figures(name: str, seconds: float, options: Options | None = None) -> Figures:
    """Three rounds, in which save and load take as long."""
    return Figures(name, options, [seconds] * 3, [seconds] * 3)


def document_of(*found: Figures) -> Document:
    return conclude(found, DEFAULT, GB) | {
        "path": "/data",
        "disk": {"file_system": "ext4", "device": "/dev/vda", "model": None},
        "machine": "2 cores",
        "size_bytes": GB,
        "rounds": 3,
        "skipped": {"fio": "not installed"},
    }


def test_the_fastest_setting_wins() -> None:
    found = conclude([figures("a", 1.0, DEFAULT), figures("b", 0.5, DEEP)], DEFAULT, GB)
    assert found["best"] == {"io": "io_uring", "block_bytes": 8 << 20, "queue_depth": 32}
    assert (found["default_share"], found["default_is_fine"]) == (0.5, False)
    assert [(s["name"], s["share"], s["default"]) for s in found["settings"]] == [
        *(("b", 1.0, False), ("a", 0.5, True)),
    ]
    assert [(s["save_gbps"], s["load_gbps"]) for s in found["settings"]] == [(2, 2), (1, 1)]


def test_a_setting_wins_by_its_median_and_not_by_its_best_round() -> None:
    lucky = Figures("lucky", DEEP, [0.1, 2.0, 2.0], [1.0] * 3)
    assert conclude([figures("a", 1.0, DEFAULT), lucky], DEFAULT, GB)["best"]["queue_depth"] == 16


def test_save_and_load_count_together() -> None:
    slow_load = Figures("b", DEEP, [0.5] * 3, [1.6] * 3)
    found = conclude([figures("a", 1.0, DEFAULT), slow_load], DEFAULT, GB)
    assert found["best"] == found["default"] and found["default_share"] == 1


def test_only_settings_of_holdfast_can_win() -> None:
    found = conclude([figures("a", 1.0, DEFAULT), figures("fio", 0.5)], DEFAULT, GB)
    assert found["best"] == found["default"] and found["default_is_fine"]
    assert [s["share"] for s in found["settings"]] == [1.0, 0.5]


@pytest.mark.parametrize(("seconds", "fine"), [(0.96, True), (0.94, False)])
def test_a_default_within_five_percent_is_fine(seconds: float, fine: bool) -> None:
    found = document_of(figures("a", 1.0, DEFAULT), figures("b", seconds, DEEP))
    assert found["default_is_fine"] == fine
    text = "\n".join(render(found))
    paste = 'Options(io="io_uring", block_bytes=8 << 20, queue_depth=32)'
    assert f"Fastest in 3 rounds: {paste}" in text
    assert ("The default is fine here: it has 96% of that speed." in text) == fine
    default = 'Options(io="io_uring", block_bytes=2 << 20, queue_depth=16)'
    assert (f"The default here, {default}, has 94% of that." in text) == (not fine)


@pytest.mark.parametrize(("slowest_s", "steady"), [(1.9, True), (2.1, False)])
def test_a_disk_that_is_not_steady_is_said_to_be(slowest_s: float, steady: bool) -> None:
    rounds = Figures("a", DEFAULT, [1.0, 1.0, slowest_s], [1.0] * 3)
    found = document_of(rounds, figures("b", 1.0))
    assert found["steady"] == steady
    lines = render(found)
    assert any("more --rounds tell more" in line for line in lines) == (not steady)
    assert any("differ by a factor of 1.45 at most" in line for line in lines) == steady
    (row,) = (line for line in lines if line.startswith("a"))
    slowest = {1.9: "0.53-1.00", 2.1: "0.48-1.00"}[slowest_s]
    assert row.split()[-5:] == ["1.00", slowest, "1.00", "1.00-1.00", "100%"], row
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(("slowest_s", "chance"), [(1.4, False), (2.6, True)])
def test_a_lead_that_is_smaller_than_what_rounds_differ_by_may_be_chance(
    slowest_s: float, chance: bool
) -> None:
    default = Figures("a", DEFAULT, [1.0, 1.0, slowest_s], [1.0] * 3)
    lines = render(document_of(default, figures("b", 0.7, DEEP)))
    assert any(line.startswith("Fastest in 3 rounds, perhaps by chance: ") for line in lines) == (
        chance
    )


def test_one_round_does_not_say_that_a_disk_is_steady() -> None:
    found = document_of(Figures("a", DEFAULT, [1.0], [1.0]))
    assert (found["spread"], found["steady"]) == (None, None)
    assert "One round does not tell" in render(found)[-1]


def test_the_winner_can_be_pasted() -> None:
    line = next(line for line in render(document_of(figures("a", 1.0, DEFAULT))) if "Opt" in line)
    assert eval(line.partition(": ")[2]) == DEFAULT


def test_the_grid_has_the_default_and_nothing_that_the_pool_cannot_hold() -> None:
    settings = [one.options for one in grid("direct")]
    assert Options(io="direct") in settings and len(set(settings)) == 11
    assert all(o.block_bytes * o.queue_depth <= STREAM_BYTES for o in settings)


def test_one_screen_says_all(
    place: Path, holdfast_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(place))  # no fio
    answer = holdfast_command("bench", place, *SMALL)
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert len(lines) < 30 and max(map(len, lines)) <= 100
    assert lines[0].startswith(f"{place}, ")
    assert lines[2].startswith("25.2 MB saved until durable, and loaded from the disk")
    assert lines[3].startswith("medians of 1 round")
    shares = [int(share) for share in re.findall(r"(\d+)%$", answer.out, re.MULTILINE)]
    assert len(shares) > 4 and max(shares) == 100  # of the fastest; several may be as fast
    assert sum("(default)" in line for line in lines) == 1
    assert lines.count("not measured: fio: not installed") == 1
    assert re.search(r'Options\(io="\w+", block_bytes=\d << 20, queue_', answer.out)
    assert list(place.iterdir()) == []


def test_json_has_every_measurement(place: Path, holdfast_command: Command) -> None:
    answer = holdfast_command("bench", place, "--json", *SMALL)
    document = answer.document
    assert answer.code == 0 and document["path"] == str(place)
    assert (document["size_bytes"], document["rounds"]) == (3 << 23, 1)
    names = [setting["name"] for setting in document["settings"]]
    assert "plain write, page cache, 8 MiB x 1" in names and len(set(names)) == len(names)
    for setting in document["settings"]:
        assert len(setting["save_s"]) == len(setting["load_s"]) == 1
        assert 0 < setting["share"] <= 1 and min(setting["save_s"] + setting["load_s"]) > 0
    ours = [setting["options"] for setting in document["settings"] if setting["options"]]
    assert document["best"] in ours and document["default"] in ours
    measured = {name.split()[0] for name in [*names, *document["skipped"]]}
    assert measured == {"holdfast", "plain", "fio"}
    assert document["disk"]["file_system"] == "tmpfs" or not str(place).startswith("/dev/shm")


def test_where_io_uring_is_forbidden_the_others_are_measured(place: Path) -> None:
    done = start_python("-c", WITHOUT_IO_URING, "bench", place, *SMALL, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert re.search("^not measured: holdfast io_uring: .*not permitted", done.stdout, re.MULTILINE)
    default = r'default.*Options\(io="(direct|buffered)"|(The|That is the) default (is fine )?here'
    assert re.search(default, done.stdout) and 'io="io_uring"' not in done.stdout
    assert "Fastest in 1 round" in done.stdout


def check_refused(answer: Answer, pattern: str) -> None:
    assert (answer.code, answer.out) == (2, "")
    assert re.fullmatch(r"holdfast: .+\n", answer.err) and re.search(pattern, answer.err)


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--gib", "0"], "--gib is 0; expected a size"),
        (["--gib", "-1"], "--gib is -1"),
        (["--gib", "nan"], "--gib is nan"),
        (["--gib", "inf"], "--gib is inf"),
        (["--gib", "much"], "invalid float value: 'much'"),
        (["--rounds", "0"], "--rounds is 0; expected 1 or more"),
    ],
)
def test_what_cannot_be_measured(
    place: Path, holdfast_command: Command, arguments: list[str], pattern: str
) -> None:
    check_refused(holdfast_command("bench", place, *arguments), pattern)


def test_a_place_that_is_none(place: Path, holdfast_command: Command) -> None:
    check_refused(holdfast_command("bench", place / "x"), "/x does not exist")
    (place / "file").touch()
    check_refused(holdfast_command("bench", place / "file"), "/file is not a directory")
    check_refused(holdfast_command("bench", "hdfs://host:1/x"), "cannot measure hdfs://host:1/x")


@pytest.mark.parametrize(("free_gb", "memory_gb"), [(2.9, 2.0), (3.0, 1.9)])
def test_too_little_room_is_refused(free_gb: float, memory_gb: float) -> None:
    def check(free_gb: float, memory_gb: float) -> None:
        room = {"free_bytes": int(free_gb * GB), "memory_bytes": int(memory_gb * GB)}
        bench_disk.check_room(Path("/data"), GB, **room)

    check(3.0, 2.0)
    with pytest.raises(OptionError, match=r"expected [23]\.00 GB, for a state of 1\.00 GB"):
        check(free_gb, memory_gb)


def test_a_state_that_fits_nowhere_is_refused(place: Path, holdfast_command: Command) -> None:
    with at_most(resource.RLIMIT_AS, 4 << 30):  # were it not refused, it would take all there is
        answer = holdfast_command("bench", place, "--gib", "1e6")
    check_refused(answer, "found .+B.*; expected .+ for a state of 1.07 PB. Choose a smaller --gib")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take its rights away")
def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o555)
    let_everybody_in(place.parent)
    # Python's own files may be out of reach afterwards, so everything is imported before.
    code = """
import os, sys
import holdfast.tools.bench
from holdfast.cli import main
main(["--version"])
os.setuid(65534)
sys.exit(main())
"""
    command = ["-c", code, "bench", place, *SMALL]
    done = start_python(*command, capture_output=True)
    assert done.returncode == 2
    assert re.fullmatch(f"holdfast: make a directory in {place}: Permission .+\n", done.stderr)
    tmp_path.chmod(0o700)
    done = start_python(*command, capture_output=True)
    assert done.returncode == 2
    assert re.fullmatch(f"holdfast: stat {place}: Permission .+\n", done.stderr)


def test_a_disk_that_fails_leaves_nothing(place: Path, holdfast_command: Command) -> None:
    with at_most(resource.RLIMIT_FSIZE, 16 << 20):  # enough for the small trials at the beginning
        check_refused(holdfast_command("bench", place, *SMALL), "File too large")
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_leaves_nothing(
    place: Path,
    holdfast_command: Command,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    # As in a shell: whoever runs the tests may have started them with signals ignored.
    before = {n: signal.getsignal(n) for n in bench_disk.STOPPING}
    for n in bench_disk.STOPPING:
        signal.signal(n, signal.default_int_handler if n == signal.SIGINT else signal.SIG_DFL)
    handlers = {n: signal.getsignal(n) for n in bench_disk.STOPPING}
    save = Plain.save

    def interrupted(self: Plain, path: Path, state: bench_contenders.State) -> float:
        save(self, path, state)
        assert list(place.iterdir()) != []
        signal.raise_signal(number)
        raise AssertionError(f"{number} was ignored")

    monkeypatch.setattr(Plain, "save", interrupted)
    try:
        found = holdfast_command("bench", place, *SMALL).code
    except SystemExit as stop:
        found = stop.code
    assert found == code and list(place.iterdir()) == []
    assert {n: signal.getsignal(n) for n in bench_disk.STOPPING} == handlers
    for n, handler in before.items():
        signal.signal(n, handler)


def test_a_signal_that_is_ignored_stays_ignored(place: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with bench_disk.scratch_in(place):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert list(place.iterdir()) == []


def test_what_cannot_be_removed_is_named(place: Path, holdfast_command: Command) -> None:
    with pytest.raises(bench_disk.StoreError, match="which is left"), bench_disk.scratch_in(place):
        shutil.rmtree(place)


@pytest.mark.parametrize("direct", [True, False])
def test_plain_calls_move_every_byte(tmp_path: Path, direct: bool) -> None:
    path, state = tmp_path / "state", make_state(3 << 23)
    plain = Plain(direct)
    try:
        assert plain.save(path, state) > 0
    except OSError:
        pytest.skip("no O_DIRECT here")
    assert path.stat().st_size == 3 << 23
    first = path.read_bytes()[: 1 << 23]
    assert path.read_bytes() == 3 * first and len(set(first)) == 256
    assert plain.load(path, state) > 0
    os.truncate(path, 1 << 23)
    with pytest.raises(bench_disk.StoreError, match="ends at byte 8388608"):
        plain.load(path, state)


def test_a_verified_load_refuses_what_the_disk_changed(new_path: NewPath) -> None:
    from holdfast.errors import CorruptError

    path, state, one = new_path(), make_state(1 << 23), Holdfast(Options())
    one.save(path, state)
    (file,) = path.glob("data/*/*.hf")
    with file.open("r+b") as data:
        data.seek(1 << 22)
        data.write(b"changed")
    with pytest.raises(CorruptError):
        one.load(path, state)


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_takes_a_path_with_a_colon(tmp_path: Path) -> None:
    path, state = tmp_path / "a:b", make_state(1 << 23)
    fio = Fio(1 << 20, 8)
    try:
        assert fio.save(path, state) > 0
    except bench_disk.StoreError as error:
        pytest.skip(str(error))
    assert path.stat().st_size == 1 << 23 and fio.load(path, state) > 0
    assert os.listdir(tmp_path) == ["a:b"]
