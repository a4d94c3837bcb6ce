"""Children that do not outlive their parent."""

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "OCTAVO_PARENT_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Where a parent has asked for it, makes the kernel end this process when the parent dies."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):  # the parent died before the call
        os.kill(os.getpid(), signal.SIGTERM)
