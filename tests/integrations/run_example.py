"""Run a script, and end before the interpreter is taken apart.

A thread of gloo's aborts a process of PyTorch 2.13 whose interpreter ends while the thread frees a
collective (pytorch#190489), once in dozens of runs on a busy machine, with or without holdfast.
"""

import atexit
import os
import runpy
import sys
import threading

sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])  # as Python does for a script
runpy.run_path(sys.argv[0], run_name="__main__")
threading._shutdown()  # type: ignore[attr-defined]  # what has to end ends here, as in Python
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
