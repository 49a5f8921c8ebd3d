"""The CUDA streams of one thread, made those of another. Knows devices; no tensors."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def held_streams(cuda: Any) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return what makes this thread's current streams those of the thread that enters it.

    Args:
        cuda: `torch.cuda`, initialized.
    """
    device = cuda.current_device()
    streams = {number: cuda.current_stream(number) for number in range(cuda.device_count())}
    # To enter a stream makes a context on its device, which takes memory there.
    own = [s for n, s in streams.items() if n != device and s != cuda.default_stream(n)]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for stream in (*own, streams[device]):
                stack.enter_context(cuda.stream(stream))
            yield

    return entered
