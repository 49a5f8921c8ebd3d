"""What plug-in authors need to test that a save survives a bad disk.

Knows only the seam below the local store.
"""

from .faults import OPERATIONS, Fault, faulty, recording

__all__ = ["OPERATIONS", "Fault", "faulty", "recording"]
