"""Copies from devices into the pool, on streams of their own. Knows elements; no files."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch

from ..boxes import U64
from .origin import LiveTensors
from .place import is_row_major

# Of the last shards on devices, those that are sampled, and about so many bytes of each.
LAST, SAMPLED_MAX, SAMPLE_BYTES = 64, 8, 512


class Held(Protocol):
    """What is to be copied, as `staging.StagingPlan` has it."""

    live: LiveTensors
    offsets: U64
    memory: torch.Tensor
    devices: list[int]

    def gather(self, shard: int, *, non_blocking: bool = False) -> None:
        """Copy a shard."""


class DeviceCopies:
    """Copies from devices into the pool, under way on streams of their own.

    The computation goes on: what it does after `order` comes after the copies.
    """

    def __init__(self, held: Held, *, samples: bool = False) -> None:
        """Start them; where the pool is pinned they overlap with what the device computes.

        Args:
            samples: for `differing`.
        """
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._samples: list[_Sample] = []
        # The large ones first: while they are copied, the host has time to ask for the small ones.
        elements = held.live.elements
        order = sorted(held.devices, key=lambda shard: elements[shard].nbytes, reverse=True)
        try:
            if samples:
                self._sample(held, order[-LAST:])
            for device, shards in _by_device(elements, order).items():
                with self._entered(device):
                    for shard in shards:
                        held.gather(shard, non_blocking=device.type == "cuda")
        except BaseException:
            self.wait()  # nothing writes into the memory when this has failed
            raise

    def order(self) -> None:
        """Let the current streams go on only after the copies; the host does not wait."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def wait(self) -> None:
        """Wait, on the host, until the bytes are there."""
        for stream in self._streams.values():
            stream.synchronize()

    def differing(self) -> int | None:
        """Return a shard that was changed before it was copied, if those copied last show one.

        A step that is replayed as a graph calls no hook, and counts no change. It changes every
        tensor, and so those that are copied last.
        """
        samples, self._samples = self._samples, []
        for sample in samples:
            with torch.cuda.stream(self._streams[sample.elements.device]):
                expected = sample.elements.cpu()
            if not torch.equal(expected, sample.copied):
                return sample.shard
        return None

    def _sample(self, held: Held, last: Sequence[int]) -> None:
        """Keep some bytes of the largest of the shards that are copied last, as they are now."""
        live, offsets = held.live, held.offsets
        for shard in [n for n in last if _can_sample(live.elements[n])][:SAMPLED_MAX]:
            elements, chunk = live.elements[shard], int(live.chunks.first[shard + 1]) - 1
            size, before = int(live.chunks.sizes[chunk]), int(live.chunks.start_bytes[chunk])
            step = max(1, size // SAMPLE_BYTES)
            run = elements.view(-1).view(torch.uint8)[before : before + size : step]
            with self._entered(elements.device):
                kept = run.clone()
            copied = held.memory[int(offsets[chunk]) :][:size:step]
            self._samples.append(_Sample(shard, kept, copied))

    def _entered(self, device: torch.device) -> AbstractContextManager[object]:
        """Make the copies' stream of a device the current one; other devices have none."""
        return torch.cuda.stream(self._stream(device)) if device.type == "cuda" else nullcontext()

    def _stream(self, device: torch.device) -> "torch.cuda.Stream":
        if device not in self._streams:
            if device not in _side_streams:
                _side_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            _side_streams[device].wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = _side_streams[device]
        return self._streams[device]


def _by_device(
    elements: Sequence[torch.Tensor], shards: Sequence[int]
) -> dict[torch.device, list[int]]:
    found: dict[torch.device, list[int]] = {}
    for shard in shards:
        found.setdefault(elements[shard].device, []).append(shard)
    return found


def _can_sample(elements: torch.Tensor) -> bool:
    is_real = elements.dtype.is_floating_point and elements.numel() > 0
    return elements.is_cuda and is_real and is_row_major(elements)


class _Sample(NamedTuple):
    """Bytes of a shard on a device, and where the same bytes of its copy are to be."""

    shard: int
    elements: torch.Tensor
    copied: torch.Tensor


_side_streams: dict[torch.device, "torch.cuda.Stream"] = {}
