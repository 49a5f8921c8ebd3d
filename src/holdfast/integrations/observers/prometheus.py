"""A file for the textfile collector of Prometheus' node exporter: no port in a trainer.

``Checkpointer("runs/a", observe=[PrometheusTextfile("/var/lib/prometheus/node-exporter")])``
"""

import os

from ... import Event

_HELP = {
    "saves_total": ("counter", "Saves that became durable."),
    "failures_total": ("counter", "Saves that failed."),
    "retired_total": ("counter", "Steps that were deleted."),
    "alerts_total": ("counter", "Alerts of holdfast."),
    "stored_bytes_total": ("counter", "Bytes written by this rank."),
    "last_step": ("gauge", "The step that became durable last."),
    "last_durable_timestamp_seconds": ("gauge", "When it became durable."),
    "last_save_seconds": ("gauge", "How long its save took."),
    "last_stall_seconds": ("gauge", "How long its save held up training."),
}
_COUNTED = {"failed": "failures_total", "retired": "retired_total", "alert": "alerts_total"}


class PrometheusTextfile:
    """An observer that keeps a file with the numbers of this rank: ``holdfast_*``.

    The node exporter reads ``*.prom`` in the directory that its option
    ``--collector.textfile.directory`` names. A rename replaces the file, so that it is always
    whole.

    Args:
        directory: that directory. Only this process writes the file of its rank there.
        job: the label ``job`` of all numbers, and a part of the file's name; default: "holdfast".
    """

    def __init__(self, directory: "str | os.PathLike[str]", job: str = "holdfast") -> None:
        self._directory, self._job = os.path.abspath(directory), job
        self._values = {name: 0.0 for name, (kind, _) in _HELP.items() if kind == "counter"}

    def __call__(self, event: Event) -> None:
        """See `holdfast.Checkpointer`."""
        values = self._values
        if event.kind == "committed":
            values["saves_total"] += 1
            values["stored_bytes_total"] += event.stored_bytes
            values["last_step"] = -1 if event.step is None else event.step
            values["last_durable_timestamp_seconds"] = event.time_s
            values["last_save_seconds"] = event.seconds.get("total", 0.0)
            values["last_stall_seconds"] = event.stall_s
        elif event.kind in _COUNTED:
            values[_COUNTED[event.kind]] += 1
        else:
            return
        labels = f'{{run="{_escaped(event.run)}",job_name="{_escaped(self._job)}"'
        labels += f',rank="{event.rank}"}}'
        lines = []
        for name, value in values.items():
            kind, text = _HELP[name]
            full = f"holdfast_{name}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full}{labels} {value!r}"]
        plain = "".join(c if c.isalnum() and c.isascii() else "_" for c in self._job)[:64]
        path = os.path.join(self._directory, f"holdfast-{plain}-{event.rank}.prom")
        with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
            file.write("\n".join([*lines, ""]))
        os.replace(file.name, path)


def _escaped(text: str) -> str:
    """Return a value of a label as the format of Prometheus has it."""
    plain = text.encode(errors="backslashreplace").decode()
    return plain.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
