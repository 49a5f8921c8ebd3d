"""The first use of a name of holdfast imports its code: by several threads, and interrupted."""

import subprocess
import sys

THREADS = """
import sys, threading
sys.setswitchinterval(1e-5)
import holdfast

begin, failed = threading.Barrier(8), []

def use(names):
    begin.wait()
    for name in names:
        try:
            getattr(holdfast, name)
        except BaseException as error:
            failed.append(f"{name}: {error!r}")

names = sorted(holdfast._HOME, key=hash)
threads = [threading.Thread(target=use, args=(names[i::8],)) for i in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*failed, sep="\\n")
print({getattr(holdfast, name).__module__ for name in ("save", "load", "Options")})
"""

HANDLER = """
import os, signal, sys
import holdfast

class Signals:
    # One at the moment at which a module that `save` needs is looked for.
    def find_spec(self, name, path=None, target=None):
        if name == "holdfast.saving.share":
            os.kill(os.getpid(), signal.SIGUSR1)

def handle(number, frame):
    try:
        print("handler:", holdfast.save)
    except ImportError as error:
        print("handler:", error)
    print(holdfast.errors.CorruptError.__name__)

signal.signal(signal.SIGUSR1, handle)
sys.meta_path.insert(0, Signals())
print("training:", holdfast.save.__name__)
print("later:", holdfast.load.__name__)
"""


def printed(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_threads_may_use_names_for_the_first_time_at_once() -> None:
    assert printed(THREADS) == "\n{'holdfast'}\n"


def test_a_handler_that_interrupts_a_first_use_is_told_so_and_breaks_nothing() -> None:
    text = "holdfast.save cannot be imported here: this call (from a signal handler?) interrupts"
    lines = printed(HANDLER).splitlines()
    assert lines[0].startswith(f"handler: {text} the import of modules that it needs")
    assert lines[1:] == ["CorruptError", "training: save", "later: load"]
