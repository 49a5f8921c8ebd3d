"""Tell a webhook when a save failed or stalled, without paths or names in the message.

python examples/09_webhook.py http://127.0.0.1:8000/hook runs/webhook
"""

import json
import logging
import sys
import urllib.request

import torch

import holdfast

logging.basicConfig(format="%(levelname)s %(message)s")
url, root = sys.argv[1:]


def post(event: holdfast.Event) -> None:
    """Send one event; an error is logged, and neither fails nor delays a save."""
    if event.kind not in ("failed", "alert"):
        return
    record = {name: event.as_dict()[name] for name in ("kind", "rule", "run", "step", "text")}
    request = urllib.request.Request(
        url, json.dumps(record).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()


model = torch.nn.Linear(16, 1)
hidden = holdfast.redacted(post)  # digests in place of paths, and only the type of an error
alerts = holdfast.Alerts(hidden, stall_s=1e-9, durable_min=30)  # a limit that every save breaks
with holdfast.Checkpointer(root, every=10, observe=[hidden, alerts]) as checkpointer:
    for step in range(1, 31):
        checkpointer.step(step, {"model": model})
    checkpointer.wait()
print(f"steps {checkpointer.steps()} are there")
