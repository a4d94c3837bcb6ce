"""A line on standard error every few seconds of a long run."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loadgen.drive import Run


@asynccontextmanager
async def progress(run: Run, label: str, interval: float) -> AsyncIterator[None]:
    """Prints how far the run is every `interval` seconds while the block runs; 0: never."""
    if interval <= 0:
        yield
        return
    task = asyncio.create_task(_print_lines(run, label, interval))
    try:
        yield
    finally:
        task.cancel()


async def _print_lines(run: Run, label: str, interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        print(f"{label} {progress_line(run, time.perf_counter())}", file=sys.stderr, flush=True)


def progress_line(run: Run, now: float) -> str:
    """Requests ended, tokens per second so far, and how long the rest may take."""
    ended = [record for record in run.records if record.ended]
    failed = sum(record.failure is not None for record in ended)
    elapsed = max(now - run.started, 1e-9)
    speed = sum(record.seen_tokens for record in run.records) / elapsed
    rest = seconds_left(run, now)
    left = "no estimate yet" if rest is None else f"about {rest:.0f} s left"
    return (
        f"[{elapsed:6.0f} s] {len(ended)}/{len(run.requests)} requests ended, {failed} failed, "
        f"{len(run.records) - len(ended)} running, {speed:.1f} output tokens/s, {left}"
    )


def seconds_left(run: Run, now: float) -> float | None:
    """An estimate from the tokens still to come and the speed so far; None before any token."""
    elapsed = now - run.started
    seen = sum(record.seen_tokens for record in run.records)
    if not seen or elapsed <= 0:
        return None
    asked = sum(request.output_tokens for request in run.requests)
    # What ended counts whole, so that failed and short requests are not waited for.
    settled = sum(record.asked_output if record.ended else record.seen_tokens for record in run.records)
    by_speed = max(0, asked - settled) * elapsed / seen
    by_arrivals = max(request.at for request in run.requests) - elapsed
    return max(by_speed, by_arrivals)
