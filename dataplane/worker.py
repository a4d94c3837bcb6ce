"""The entry point of a worker process."""

import logging
import os
import sys
from typing import NoReturn

from octavo.common.logs import set_up_logging
from octavo.dataplane.options import WorkerOptions
from octavo.dataplane.stopping import StopSignal


def main(options: WorkerOptions) -> int:
    """Runs a worker until SIGTERM or SIGINT. Returns the process's exit code."""
    set_up_logging("worker", options.log_level)
    stop = StopSignal()
    yield_idle_cores()
    keep_torch_quiet()
    # Only now, because it loads torch, whose threads read the variable once.
    from octavo.dataplane.process import run

    code = run(options, stop)
    if options.tensor_parallel > 1:
        end_now(code)
    return code


def end_now(code: int) -> NoReturn:
    """Ends the process, without the destructors of torch's process groups: they wait for ranks that
    do not answer, and abort the process when such a rank comes back meanwhile."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def keep_torch_quiet() -> None:
    """Leaves it to the worker's own lines that a rank is gone: torch tells it with stack traces."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def yield_idle_cores() -> None:
    """Lets torch's threads spin only shortly before they sleep, unless the user decides otherwise.

    By default they wait for one another spinning for milliseconds, and where another process wants a
    core the thread that computes is pushed aside by the one that waits for it: on two cores beside
    one busy process a decode step of 16 rows took 2.7 to 5.6 s. Sleeping at once costs on quiet
    cores: 31 / 35 / 67 ms a step of 1 / 4 / 16 rows, against 17 / 22 / 44 spinning. Some 10,000
    turns keep the latter without the former.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
