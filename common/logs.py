"""Log lines: time, process, level, text. Prompts and answers never appear in them."""

import logging
import sys


def set_up_logging(process: str, level: str = "info") -> None:
    """Sends this process's log to standard error, each line marked with the process's name."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s.%(msecs)03d {process:<12} %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
