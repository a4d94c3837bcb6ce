"""What one request did: the times of its deltas, its tokens, or how it failed. Times in seconds."""

import itertools
from array import array
from dataclasses import dataclass, field


class RequestError(Exception):
    """A request that did not complete. `kind` groups failures, the text is the server's own."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail[:500]


@dataclass(slots=True)
class Record:
    """One request. The client that runs it fills it, nobody else writes."""

    asked_prompt: int  # tokens
    asked_output: int  # tokens
    due: float  # when it should be sent
    sent: float = 0.0
    ended: float = 0.0
    delta_times: "array[float]" = field(default_factory=lambda: array("d"))
    seen_tokens: int = 0  # token ids in the deltas, or the deltas where they carry no ids
    prompt_tokens: int | None = None  # by the server's own count
    output_tokens: int | None = None
    cached_tokens: int = 0
    failure: RequestError | None = None

    def delta(self, now: float, tokens: int) -> None:
        """Some output has arrived."""
        self.delta_times.append(now)
        self.seen_tokens += tokens

    def usage(self, prompt: int, output: int, cached: int) -> None:
        """The server's own count of tokens."""
        self.prompt_tokens, self.output_tokens, self.cached_tokens = prompt, output, cached

    @property
    def output(self) -> int:
        """Output tokens: the server's count, else what was seen."""
        return self.seen_tokens if self.output_tokens is None else self.output_tokens

    @property
    def prompt(self) -> int:
        """Prompt tokens: the server's count, else what was sent."""
        return self.asked_prompt if self.prompt_tokens is None else self.prompt_tokens

    @property
    def is_short(self) -> bool:
        """Whether a request that completed has fewer tokens than asked for."""
        return self.failure is None and self.output < self.asked_output

    # -- latencies; a request counts from when it was due, so that a late client cannot hide any ---

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return self.delta_times[0] - self.due if self.delta_times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first."""
        if self.output < 2 or len(self.delta_times) < 2:
            return None
        return (self.delta_times[-1] - self.delta_times[0]) / (self.output - 1)

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: times between deltas that follow one another."""
        times = self.delta_times
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def latency(self) -> float:
        """End to end."""
        return self.ended - self.due

    @property
    def normalized_latency(self) -> float | None:
        """End-to-end latency over output tokens."""
        return self.latency / self.output if self.output else None
