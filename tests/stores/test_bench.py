"""`holdfast bench` on a bucket: it finds a setting, and leaves nothing behind."""

import json
import subprocess
import sys

import pytest

from holdfast.errors import OptionError
from holdfast.stores.url import open_store
from holdfast.tools.bench_report import Figures
from holdfast.tools.bench_store import DEFAULT, Setting, bench_store, conclude, render
from stores.places import Place

GB = 10**9
LARGE = Setting(32 << 20, 16)


def test_bench_measures_a_bucket_and_leaves_nothing_there(new_place: Place) -> None:
    place = new_place()
    if not place.startswith(("s3://", "az://", "gs://")):
        pytest.skip("bench takes buckets")
    words = ["bench", place, "--gib", "0.01", "--rounds", "1", "--seconds", "5", "--json"]
    program = "import sys; from holdfast.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["settings"][0]["save_gbps"] > 0 and found["settings"][0]["load_gbps"] > 0
    assert {"part_bytes", "parts_in_flight"} < found["best"].keys()
    assert not open_store(place).exists("")


@pytest.mark.parametrize("url", ["memory://a/b", "hdfs://host/a", "s3://", "s3://name@bucket"])
def test_bench_refuses_what_is_no_bucket(url: str) -> None:
    with pytest.raises(OptionError, match="expected the URL of a bucket"):
        bench_store(url, gib=1.0, rounds=1, limit_s=1.0)


def test_bench_says_how_to_set_what_is_fastest() -> None:
    slow, fast = Figures(DEFAULT.name, None, [2.0], [2.0]), Figures(LARGE.name, None, [1.0], [1.0])
    document = conclude({DEFAULT: slow, LARGE: fast}, GB)
    lines = render({"path": "s3://b/runs", "bucket": "s3://b", "machine": "", **document})
    assert lines[-3:] == [
        'Fastest: StoreSettings("s3://b", part_bytes=32 << 20, parts_in_flight=16)',
        "with Options(pool_bytes=544 << 20, store=...)",
        "The default has 50% of that.",
    ]


def test_bench_says_that_the_default_is_fine() -> None:
    default, other = (Figures(one.name, None, [1.0], [1.0]) for one in (DEFAULT, LARGE))
    document = conclude({DEFAULT: default, LARGE: other}, GB)
    lines = render({"path": "s3://b", "bucket": "s3://b", "machine": "", **document})
    assert lines[-1].startswith("The default is fine here")
