import numpy as np
import pytest
from loadgen.drive import Run
from loadgen.progress import progress_line, seconds_left
from loadgen.records import Record, RequestError
from loadgen.report import figures, remarks, sweep_text, text
from loadgen.workload import Request
from measure.figures import Spread, number, table


def record(deltas: list[tuple[float, int]], asked: int = 4, due: float = 10.0) -> Record:
    made = Record(asked_prompt=6, asked_output=asked, due=due, sent=due + 0.001)
    for now, tokens in deltas:
        made.delta(now, tokens)
    made.ended = deltas[-1][0] + 0.5 if deltas else due
    return made


def test_spread_is_numpy_and_interpolates() -> None:
    values = np.random.default_rng(2).exponential(size=357).tolist()
    spread = Spread.of(values)
    assert spread is not None
    assert spread.count == 357
    assert spread.mean == pytest.approx(np.mean(values))
    assert spread.p50 == pytest.approx(np.percentile(values, 50))
    assert spread.p99 == pytest.approx(np.percentile(values, 99))
    four = Spread.of([4.0, 1.0, 3.0, 2.0])
    assert four is not None and (four.mean, four.p50) == (2.5, 2.5)
    assert four.p99 == pytest.approx(3.97)
    assert Spread.of([]) is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0, "0"),
        (0.01234, "0.0123"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (12345, "12345"),
    ],
)
def test_numbers_keep_three_digits(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_table_aligns_columns() -> None:
    assert table(["a", "bb"], [["long", "1"], ["x", "1234"]]).splitlines() == [
        "a       bb",
        "----  ----",
        "long     1",
        "x     1234",
    ]


def test_latencies_of_one_request() -> None:
    made = record([(10.5, 1), (10.7, 1), (11.5, 2)])
    assert made.output == 4
    assert made.ttft == pytest.approx(0.5)
    assert made.tpot == pytest.approx(1.0 / 3)
    assert made.gaps == pytest.approx([0.2, 0.8])
    assert made.latency == pytest.approx(2.0)
    assert made.normalized_latency == pytest.approx(0.5)


def test_the_servers_count_wins_over_what_was_seen() -> None:
    made = record([(10.5, 1), (11.0, 1)], asked=6)
    made.usage(prompt=9, output=6, cached=4)
    assert (made.prompt, made.output, made.is_short) == (9, 6, False)
    assert made.tpot == pytest.approx(0.1)


def test_a_request_without_output_has_no_latencies_per_token() -> None:
    made = record([])
    assert (made.ttft, made.tpot, made.normalized_latency, made.gaps) == (None, None, None, [])


def failing_run() -> Run:
    good, short = record([(10.5, 1), (11.5, 3)]), record([(10.5, 1), (11.0, 1)])
    refused, late, again = record([]), record([(10.9, 1)]), record([])
    refused.failure = RequestError("http 429", "queue is full")
    again.failure = RequestError("http 429", "queue is still full")
    late.failure = RequestError("timeout", "no end after 1 s")
    run = Run([Request([1] * 6, 4, 0.0)] * 5, [good, short, refused, late, again])
    run.started, run.wall, run.client_cpu = 10.0, 2.0, 0.1
    return run


def test_failed_requests_count_apart_and_by_kind() -> None:
    result = figures("all", failing_run())
    assert (result.requests, result.completed, result.failed) == (5, 2, 3)
    assert result.failures == {"http 429": 2, "timeout": 1}
    assert result.failure_examples["http 429"] == "queue is full"
    assert result.output_tokens == 6 and result.output_rate == pytest.approx(3.0)
    assert result.prompt_tokens == 12 and result.total_rate == pytest.approx(9.0)
    assert (result.short_requests, result.missing_tokens) == (1, 2)
    ttft = result.latencies["ttft"]
    assert ttft is not None and ttft.count == 2
    assert result.client_cpu_share == pytest.approx(0.05)


def test_reports_name_what_went_wrong() -> None:
    result = figures("5 clients", failing_run())
    for shown in (text(result), sweep_text([result])):
        assert "FAILED 2 x http 429: queue is full" in shown
        assert "SHORT: 1 requests gave fewer tokens than asked for, 2 in all" in shown
    assert "2 / 3" in text(result)


def test_a_busy_client_is_pointed_out() -> None:
    run = failing_run()
    run.client_cpu = 1.5
    assert any("half a core" in note for note in remarks(figures("all", run)))


def test_a_run_in_which_all_failed_still_reports() -> None:
    run = failing_run()
    run.records = run.records[2:3]
    result = figures("all", run)
    assert result.output_rate == 0 and result.latencies["tpot"] is None
    assert "0 / 5" in text(result)
    assert sweep_text([result]).count(" -") >= 6


def test_progress_counts_what_is_settled_and_what_is_left() -> None:
    run = failing_run()
    run.records[0].ended = 0.0  # 4 tokens seen, still running
    assert seconds_left(run, 12.0) == pytest.approx((20 - 4 - 4 * 4) * 2.0 / 7)
    line = progress_line(run, 12.0)
    assert "4/5 requests ended, 3 failed, 1 running, 3.5 output tokens/s, about 0 s left" in line
    run.requests = [*run.requests, Request([1], 4, at=60.0)]
    assert seconds_left(run, 12.0) == pytest.approx(58.0)
    assert "no estimate yet" in progress_line(Run(run.requests, started=10.0), 12.0)
