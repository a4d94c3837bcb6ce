"""What a run has shown: its figures, as JSON and as text."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from measure.figures import Spread, number, spread_rows, table

from loadgen.drive import Run
from loadgen.records import Record

# Name in the table, name in the JSON.
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "inter_token": "inter-token latency",
    "end_to_end": "end-to-end latency",
    "normalized": "normalized latency",
}


@dataclass(frozen=True)
class Figures:
    """The figures of one run. Rates count completed requests only."""

    label: str  # how requests arrived
    requests: int
    completed: int
    wall_seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    short_requests: int  # completed with fewer tokens than asked for
    missing_tokens: int  # how many fewer
    failures: dict[str, int]  # by kind
    failure_examples: dict[str, str]  # the first of each kind
    latencies: dict[str, Spread | None]  # seconds
    client_cpu_share: float  # of one core
    latest_send_seconds: float  # how long after it was due the latest request was sent

    @property
    def failed(self) -> int:
        return self.requests - self.completed

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.wall_seconds

    @property
    def total_rate(self) -> float:
        """Prompt and output tokens per second."""
        return (self.prompt_tokens + self.output_tokens) / self.wall_seconds

    @property
    def request_rate(self) -> float:
        """Requests per second."""
        return self.completed / self.wall_seconds

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "failed": self.failed,
            "output_tokens_per_second": self.output_rate,
            "total_tokens_per_second": self.total_rate,
            "requests_per_second": self.request_rate,
        }


def figures(label: str, run: Run) -> Figures:
    """The figures of a run that has ended."""
    good = [record for record in run.records if record.failure is None]
    failures = [record.failure for record in run.records if record.failure is not None]
    short = [record for record in good if record.is_short]
    return Figures(
        label=label,
        requests=len(run.requests),
        completed=len(good),
        wall_seconds=run.wall,
        prompt_tokens=sum(record.prompt for record in good),
        cached_tokens=sum(record.cached_tokens for record in good),
        output_tokens=sum(record.output for record in good),
        short_requests=len(short),
        missing_tokens=sum(record.asked_output - record.output for record in short),
        failures=dict(Counter(failure.kind for failure in failures)),
        failure_examples={failure.kind: failure.detail for failure in reversed(failures)},
        latencies=_latencies(good),
        client_cpu_share=run.client_cpu / run.wall,
        latest_send_seconds=max((record.sent - record.due for record in run.records), default=0.0),
    )


def _latencies(records: Sequence[Record]) -> dict[str, Spread | None]:
    return {
        "ttft": _spread(records, lambda record: record.ttft),
        "tpot": _spread(records, lambda record: record.tpot),
        "inter_token": Spread.of([gap for record in records for gap in record.gaps]),
        "end_to_end": _spread(records, lambda record: record.latency),
        "normalized": _spread(records, lambda record: record.normalized_latency),
    }


def _spread(records: Sequence[Record], value: Callable[[Record], float | None]) -> Spread | None:
    return Spread.of([found for record in records if (found := value(record)) is not None])


def per_request(run: Run) -> list[dict[str, Any]]:
    """One line for each request, for the JSON file."""
    return [
        {
            "due": record.due - run.started,
            "prompt_tokens": record.prompt,
            "asked_tokens": record.asked_output,
            "output_tokens": record.output,
            "ttft": record.ttft,
            "tpot": record.tpot,
            "end_to_end": record.latency,
            "failure": record.failure.kind if record.failure else None,
        }
        for record in run.records
    ]


def text(result: Figures) -> str:
    """The figures of one run, to read."""
    counts = [
        ["requests completed / failed", f"{result.completed} / {result.failed}"],
        ["wall time, s", number(result.wall_seconds)],
        ["prompt tokens (cached)", f"{result.prompt_tokens} ({result.cached_tokens})"],
        ["output tokens", str(result.output_tokens)],
        ["output tokens/s", number(result.output_rate)],
        ["total tokens/s", number(result.total_rate)],
        ["requests/s", number(result.request_rate)],
        ["client's own CPU, % of a core", number(result.client_cpu_share * 100)],
        ["latest send after due time, ms", number(result.latest_send_seconds * 1000)],
    ]
    named = {LATENCIES[key]: spread for key, spread in result.latencies.items()}
    latencies = table(["milliseconds", "mean", "p50", "p99"], spread_rows(named, 1000))
    return "\n\n".join([table([result.label, ""], counts), latencies, *remarks(result)])


def sweep_text(results: Sequence[Figures]) -> str:
    """One row for each run."""
    header = ["", "done/failed", "output tok/s", "total tok/s", "TTFT p50", "p99"]
    header += ["TPOT p50", "p99", "normalized p50", "p99", "client CPU %"]
    rows = []
    for result in results:
        rates = [number(result.output_rate), number(result.total_rate)]
        latencies = [
            number(None if spread is None else value * 1000)
            for key in ("ttft", "tpot", "normalized")
            for spread in (result.latencies[key],)
            for value in ((spread.p50, spread.p99) if spread else (0.0, 0.0))
        ]
        done = f"{result.completed}/{result.failed}"
        rows.append([result.label, done, *rates, *latencies, number(result.client_cpu_share * 100)])
    notes = [f"{result.label}: {note}" for result in results for note in remarks(result)]
    return "\n".join([table(header, rows), "(latencies in milliseconds)", *notes])


def remarks(result: Figures) -> list[str]:
    """What a reader must know before trusting the figures."""
    notes = [
        f"FAILED {count} x {kind}: {result.failure_examples[kind]}"
        for kind, count in result.failures.items()
    ]
    if result.short_requests:
        notes.append(
            f"SHORT: {result.short_requests} requests gave fewer tokens than asked for, "
            f"{result.missing_tokens} in all"
        )
    if result.completed and result.client_cpu_share > 0.5:
        notes.append("WARNING: the client used more than half a core; the server may have been waiting")
    return notes
