#!/usr/bin/env python3
"""Runs recorded plans on an engine alone: no sockets, no other process. `bench/replay.py` records them.

Prints a JSON object: seconds of the measured plans, seconds of the same plans by the worker's own count
when they were recorded, and how many of the tokens differ from the recorded ones.

    python bench/replay_engine.py plans.bin --engine torch
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure.engines import add_engine_options, device_of, engine_options, make_engine
from measure.recording import Recording, RecordingError

from octavo.common.modelfiles import ModelError
from octavo.common.options import OptionError
from octavo.dataplane.engine import EngineError
from octavo.dataplane.options import WorkerOptions
from octavo.dataplane.plan_loop import Epoch
from octavo.kernels.table import kernels_for
from octavo.proto.plan import Result
from octavo.proto.wire import ProtocolError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recording", type=Path)
    add_engine_options(parser)
    options = parser.parse_args()
    try:
        print(json.dumps(replay(Recording.load(options.recording), engine_options(options))))
    except (ModelError, EngineError, OptionError, RecordingError, ProtocolError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def replay(recording: Recording, options: WorkerOptions) -> dict[str, Any]:
    """Runs every plan of a recording and times those of the measured run."""
    reset, plans, recorded = recording.unpack()
    files, engine = make_engine(options)
    engine.make_pools(reset.num_blocks, reset.block_size, reset.num_cpu_blocks)
    engine.warm_up(reset.num_slots)
    vocab_size = int(files.config["vocab_size"])
    runner = Epoch(reset, engine, kernels_for(device_of(engine)), vocab_size).runner
    results = [runner.run(plan, reset.rank) for plan in plans[: recording.first]]
    started = time.perf_counter()
    results += [runner.run(plan, reset.rank) for plan in plans[recording.first :]]
    seconds = time.perf_counter() - started
    pairs = list(zip(results, recorded, strict=True))
    return {
        "plans": len(plans) - recording.first,
        "seconds": seconds,
        "recorded_seconds": sum(map(_computing, recorded[recording.first :])),
        "tokens": sum(len(result.tokens) for result in recorded),
        "different_tokens": sum(int(np.sum(ours.tokens != theirs.tokens)) for ours, theirs in pairs),
    }


def _computing(result: Result) -> float:
    """Seconds that the worker's runner took, by its own count."""
    timings = result.timings
    return timings.apply + timings.forward + timings.sample


if __name__ == "__main__":
    sys.exit(main())
