"""Adapters of observers with the real tools, which read back what was sent: `make observers`."""

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Event

HOSTILE = 'a"b\\c\x1b[2J\n<script>'  # in the name of a run and of a metric


def train(root: Path, *observers: Any, fail: bool = False) -> list[Event]:
    """Save steps 10 and 20, and restore; with ``fail``, let step 30 fail."""
    events: list[Event] = []
    state = {"w": torch.arange(4096.0)}
    observe = [events.append, *observers]
    with holdfast.Checkpointer(root, keep=holdfast.Keep.latest(1), observe=observe) as one:
        for step in (10, 20):
            one.save(step, state, metrics={"loss": 1.0 / step, HOSTILE: float("nan")})
        one.restore(state)
        if fail:
            root.rename(root.with_name("gone"))
            with pytest.raises(holdfast.errors.StoreError):
                one.save(30, state)
    return events


def committed(events: list[Event]) -> list[Event]:
    return [event for event in events if event.kind == "committed"]


def test_opentelemetry_has_a_span_for_each_save_and_its_numbers(tmp_path: Path) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from holdfast.integrations.observers.opentelemetry import OpenTelemetry

    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    observer = OpenTelemetry(tracers, MeterProvider([reader]))
    events = train(tmp_path / "run", observer, fail=True)

    found = spans.get_finished_spans()
    names = ["holdfast.save", "holdfast.save", "holdfast.restore", "holdfast.save"]
    assert [span.name for span in found] == names
    first, _, restored, failed = found
    done = committed(events)
    assert first.attributes["holdfast.step"] == 10
    assert first.attributes["holdfast.stored_bytes"] == done[0].stored_bytes
    assert first.attributes["holdfast.seconds.total"] == done[0].seconds["total"]
    assert [event.name for event in first.events] == ["written"]
    assert first.end_time == int(done[0].time_s * 1e9) > first.start_time
    assert restored.attributes["holdfast.bytes"] > 0 and restored.end_time > restored.start_time
    assert not failed.status.is_ok and "is gone" in failed.status.description

    metrics = {
        metric.name: metric.data.data_points
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    saves = {point.attributes["outcome"]: point.value for point in metrics["holdfast.saves"]}
    assert saves == {"committed": 2, "failed": 1}
    assert metrics["holdfast.save.duration"][0].count == 2
    stored = metrics["holdfast.save.stored"][0].value
    assert stored == sum(event.stored_bytes for event in done)


def attributes_of(holder: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a span or a point, as JSON of OTLP has them."""
    return {one["key"]: next(iter(one["value"].values())) for one in holder["attributes"]}


def test_opentelemetry_sends_spans_and_metrics_over_http_to_a_process(tmp_path: Path) -> None:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from holdfast.integrations.observers.opentelemetry import OpenTelemetry

    program = Path(__file__).with_name("receiver.py")
    log = tmp_path / "received"
    with started(sys.executable, program, log=log):
        until = time.monotonic() + 60
        while not log.read_text().endswith("\n"):
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        url = f"http://127.0.0.1:{int(log.read_text())}/v1"
        tracers = TracerProvider()
        tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/traces")))
        meters = MeterProvider(
            [PeriodicExportingMetricReader(OTLPMetricExporter(f"{url}/metrics"))]
        )
        root = tmp_path / HOSTILE.replace("/", "_")
        events = train(root, OpenTelemetry(tracers, meters), fail=True)
        tracers.shutdown()
        meters.shutdown()
        received = [json.loads(line) for line in log.read_text().splitlines()[1:]]

    traces = [one["request"] for one in received if one["path"] == "/v1/traces"]
    spans = [
        span
        for request in traces
        for resource in request["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    assert [span["name"].removeprefix("holdfast.") for span in spans] == [
        *("save", "save", "restore", "save")
    ]
    done = committed(events)
    found = attributes_of(spans[0])
    assert found["holdfast.run"] == str(root), "whatever is in the name"
    assert int(found["holdfast.step"]) == 10
    assert int(found["holdfast.stored_bytes"]) == done[0].stored_bytes
    assert found["holdfast.seconds.total"] == done[0].seconds["total"]
    assert int(spans[0]["endTimeUnixNano"]) == int(done[0].time_s * 1e9)
    assert spans[3]["status"]["code"] == "STATUS_CODE_ERROR"
    assert "is gone" in spans[3]["status"]["message"]

    metrics = {
        metric["name"]: metric
        for one in received
        if one["path"] == "/v1/metrics"
        for resource in one["request"]["resourceMetrics"]
        for scope in resource["scopeMetrics"]
        for metric in scope["metrics"]
    }
    saves = metrics["holdfast.saves"]["sum"]["dataPoints"]
    assert {attributes_of(one)["outcome"]: int(one["asInt"]) for one in saves} == {
        "committed": 2,
        "failed": 1,
    }
    (duration,) = metrics["holdfast.save.duration"]["histogram"]["dataPoints"]
    assert int(duration["count"]) == 2
    assert duration["sum"] == pytest.approx(sum(event.seconds["total"] for event in done))
    (stored,) = metrics["holdfast.save.stored"]["sum"]["dataPoints"]
    assert int(stored["asInt"]) == sum(event.stored_bytes for event in done)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextlib.contextmanager
def started(*command: object, log: Path) -> Iterator[None]:
    with log.open("w") as out:
        process = subprocess.Popen([*map(str, command)], stdout=out, stderr=out)
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


def get(url: str, until_s: float = 60.0) -> str:
    """Read a page of a server that may not be up yet."""
    until = time.monotonic() + until_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as page:
                return str(page.read().decode())
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's prometheus is not there")
def test_prometheus_scrapes_the_textfile_through_the_node_exporter(tmp_path: Path) -> None:
    from holdfast.integrations.observers.prometheus import PrometheusTextfile

    directory = tmp_path / "textfiles"
    directory.mkdir()
    root = tmp_path / HOSTILE.replace("/", "_")
    events = train(root, PrometheusTextfile(directory, job="train 7b"), fail=True)
    assert [path.name for path in directory.iterdir()] == ["holdfast-train_7b-0.prom"]

    exporter, server = free_port(), free_port()
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {"job_name": "n", "static_configs": [{"targets": [f"127.0.0.1:{exporter}"]}]}
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    node = started(
        "prometheus-node-exporter",
        "--collector.disable-defaults",
        "--collector.textfile",
        f"--collector.textfile.directory={directory}",
        f"--web.listen-address=127.0.0.1:{exporter}",
        log=tmp_path / "node.log",
    )
    scraper = started(
        "prometheus",
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/tsdb",
        f"--web.listen-address=127.0.0.1:{server}",
        log=tmp_path / "prometheus.log",
    )
    with node, scraper:
        assert "node_textfile_scrape_error 0" in get(f"http://127.0.0.1:{exporter}/metrics")
        query = urllib.parse.quote('{__name__=~"holdfast_.*"}')
        until = time.monotonic() + 60
        result: list[Any] = []
        while not result and time.monotonic() < until:
            page = get(f"http://127.0.0.1:{server}/api/v1/query?query={query}")
            result = json.loads(page)["data"]["result"]
            time.sleep(0.2)
    found = {one["metric"]["__name__"]: one for one in result}
    assert {one["metric"]["run"] for one in result} == {str(root)}, "whatever is in the name"
    values = {name: float(one["value"][1]) for name, one in found.items()}
    done = committed(events)
    assert values["holdfast_saves_total"] == 2 and values["holdfast_failures_total"] == 1
    assert values["holdfast_retired_total"] == 1 and values["holdfast_last_step"] == 20
    assert values["holdfast_stored_bytes_total"] == sum(event.stored_bytes for event in done)
    assert values["holdfast_last_durable_timestamp_seconds"] == pytest.approx(done[1].time_s)


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from holdfast.integrations.observers.tensorboard import TensorBoard

    with SummaryWriter(tmp_path / "board") as writer:
        events = train(tmp_path / "run", TensorBoard(writer), fail=True)
    read = EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    seconds = read.Scalars("holdfast/seconds")
    assert [(one.step, one.value) for one in seconds] == [
        (event.step, pytest.approx(event.seconds["total"])) for event in committed(events)
    ]
    stored = [one.value for one in read.Scalars("holdfast/stored_bytes")]
    assert stored == [event.stored_bytes for event in committed(events)]
    assert "holdfast/part/write" in read.Tags()["scalars"]
    (text,) = read.Tensors("holdfast/failed/text_summary")
    assert b"StoreError: " in text.tensor_proto.string_val[0] and text.step == 30


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Read the log of an offline run, which is in the format of LevelDB's logs."""
    block_bytes, head_bytes, at, record = 32768, 7, 7, b""
    assert data[:4] == b":W&B"
    while at + head_bytes <= len(data):
        if block_bytes - at % block_bytes < head_bytes:
            at += block_bytes - at % block_bytes
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + head_bytes])
        record += data[at + head_bytes : at + head_bytes + size]
        at += head_bytes + size
        if kind in (1, 4):  # whole, or the last of several parts
            yield record
            record = b""


def test_wandb_offline_has_an_artifact_that_refers_to_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    import wandb
    from wandb.proto import wandb_internal_pb2

    from holdfast.integrations.observers.wandb import WandB

    run = wandb.init(project="p", dir=tmp_path)
    events = train(tmp_path / "run:1", WandB(run), fail=True)
    run.finish()

    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found, alerts = [], []
    for data in wandb_records(log.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.request.HasField("log_artifact"):
            found.append(record.request.log_artifact.artifact)
        elif record.HasField("artifact"):
            found.append(record.artifact)
        elif record.HasField("alert"):
            alerts.append(record.alert)
    assert len(found) == 2
    for artifact, event in zip(found, committed(events), strict=True):
        assert artifact.type == "checkpoint" and artifact.name.startswith("run_1-")
        assert f"step-{event.step}" in artifact.aliases
        (entry,) = artifact.manifest.contents
        assert entry.ref == f"holdfast://{event.path}"
        metadata = json.loads(artifact.metadata)
        assert metadata["step"] == event.step and metadata["stored_bytes"] == event.stored_bytes
    assert [alert.title for alert in alerts] == ["holdfast: failed"]
    assert "is gone" in alerts[0].text


def test_mlflow_has_metrics_and_a_reference_for_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    from holdfast.integrations.observers.mlflow import MLflow

    client = MlflowClient(f"file://{tmp_path}/mlruns")
    experiment = client.create_experiment("e")
    run_id = client.create_run(experiment).info.run_id
    observer = MLflow(run_id, f"file://{tmp_path}/mlruns")
    events = train(tmp_path / "run", observer, fail=True)

    found = client.get_metric_history(run_id, "holdfast/seconds")
    assert [(one.step, one.value) for one in found] == [
        (event.step, event.seconds["total"]) for event in committed(events)
    ]
    names = [file.path for file in client.list_artifacts(run_id, "holdfast")]
    assert names == ["holdfast/step-10.json", "holdfast/step-20.json"]
    place = client.download_artifacts(run_id, names[1])
    record = json.loads(Path(place).read_text())
    assert record["path"] == committed(events)[1].path
    assert record["metrics"] == {"loss": 0.05, HOSTILE: "nan"}
    tags = client.get_run(run_id).data.tags
    assert tags["holdfast.latest"] == record["path"]
    assert "is gone" in tags["holdfast.failed"]


def test_no_adapter_is_longer_than_a_page() -> None:
    import holdfast.integrations.observers as here

    folder = Path(os.path.dirname(here.__file__))
    lengths = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.py")}
    assert len(lengths) == 6 and max(lengths.values()) <= 80
