"""How long the device takes, where the host only hands work to it."""

import time

import torch


class Stopwatch:
    """Seconds between its making and `stop`, on the device's own clock if it has one."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._begin = self._now()
        self._end: float | torch.cuda.Event | None = None

    def _now(self) -> "float | torch.cuda.Event":
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def stop(self) -> None:
        self._end = self._now()

    def seconds(self) -> float:
        """Waits for the device to get there."""
        begin, end = self._begin, self._end
        if isinstance(begin, float) and isinstance(end, float):
            return end - begin
        assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
