"""Power cuts on a real file system: whatever subset of unsynced writes is left keeps promises."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import disks
from blocks.states import Replay, choose_cuts, flushed_before
from blocks.write_log import Entry

BLOCK_LOOP = Path(__file__).parent / "block_loop.py"
SEED = os.environ.get("CRASH_SEED") or str(random.randrange(1 << 32))
PAGE = 4096


def run_block_loop(*arguments: str) -> "subprocess.CompletedProcess[str]":
    if reason := disks.missing(disks.EXT4):
        pytest.skip(reason)
    command = [sys.executable, BLOCK_LOOP, "--file-systems", "ext4", "--seed", SEED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=115, check=False)
    print(done.stdout, done.stderr)
    return done


def test_a_power_cut_loses_nothing_that_was_acknowledged_on_ext4() -> None:
    done = run_block_loop("--states", "40")
    assert done.returncode == 0
    assert "in all: 40 states" in done.stdout


def test_a_fault_planted_in_the_commit_shows_on_ext4() -> None:
    done = run_block_loop("--plant", "no fsync of data files", "no fsync of MANIFEST")
    assert done.returncode == 0
    assert "2 of 2 planted faults caught" in done.stdout


def random_log(rng: random.Random, pages: int, length: int) -> list[Entry]:
    """Writes of one value each, which no other has, and flushes between them."""
    entries = []
    for number in range(1, length + 1):
        data, first = None, rng.randrange(pages)
        if rng.random() > 0.2:
            count = rng.randint(1, pages - first)
            data = number.to_bytes(2, "little") * (count * PAGE // 2)
        entries.append(Entry(first * PAGE, data, number))
    return entries


def test_a_crash_state_has_of_each_sector_what_was_flushed_or_written_since(tmp_path: Path) -> None:
    rng, pages = random.Random(SEED), 6
    entries = random_log(rng, pages, 80)
    base = tmp_path / "base"
    base.write_bytes(bytes(pages * PAGE))
    replay = Replay(base, entries, tmp_path / "image")
    cuts = choose_cuts(entries, 0, [10, 20], 400, rng)
    seen, digests = set(), {}
    for cut, digest in replay.states(cuts, 512, rng):
        found = replay.image.read_bytes()
        assert digests.setdefault(digest, found) == found
        flushed = flushed_before(entries, cut.position)
        for sector in range(0, len(found), 512):
            allowed = {0}
            for number, entry in enumerate(entries[: cut.position]):
                data = entry.data or b""
                if entry.offset <= sector < entry.offset + len(data):
                    value = int.from_bytes(data[:2], "little")
                    allowed = {value} if number < flushed else {*allowed, value}
            values = {found[at : at + 2] for at in range(sector, sector + 512, 2)}
            assert len(values) == 1, "a sector is torn"
            assert int.from_bytes(values.pop(), "little") in allowed
        seen.add(cut.kind)
        # A mount writes too: all of that is undone for the next state.
        with open(replay.image, "r+b") as image:
            image.seek(rng.randrange(pages) * PAGE)
            image.write(rng.randbytes(PAGE))
    replay.close()
    assert len(digests) > 100
    assert seen >= {"nothing", "everything", "dropped", "reordered", "torn"}
