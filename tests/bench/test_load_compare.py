import dataclasses

import pytest
from loadgen.compare import Comparison, Turn, order
from loadgen.drive import Run
from loadgen.report import Figures, figures
from measure.figures import Spread

POINTS = ("1 client", "4 clients")


def made(label: str, rate: float, tpot: float | None) -> Figures:
    """Figures of a run of 10 s."""
    spread = None if tpot is None else Spread(count=1, mean=tpot, p50=tpot, p99=tpot)
    latencies = {"tpot": spread, "ttft": spread}
    empty = figures(label, Run(requests=[], wall=10.0))
    return dataclasses.replace(empty, output_tokens=round(10 * rate), latencies=latencies)


def turn(number: int, server: str, rates: tuple[float, float], tpot: float | None = 0.02) -> Turn:
    return Turn(number, server, tuple(made(p, r, tpot) for p, r in zip(POINTS, rates, strict=True)))


@pytest.fixture
def comparison() -> Comparison:
    return Comparison(
        [
            turn(0, "ours", (20, 90), tpot=0.05),
            turn(0, "peer", (10, 30), tpot=0.10),
            turn(1, "ours", (30, 100), tpot=0.01),
            turn(1, "peer", (10, 50), tpot=None),
            turn(2, "ours", (10, 120), tpot=0.03),
            turn(2, "peer", (20, 20), tpot=0.20),
        ]
    )


def test_every_other_round_runs_backwards() -> None:
    assert [order(["a", "b", "c"], number) for number in (0, 1, 2)] == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["a", "b", "c"],
    ]


def test_medians_are_over_rounds(comparison: Comparison) -> None:
    first, second = comparison.medians("ours")
    assert (first["output_tokens_per_second"], first["tpot_p50"]) == (20, 0.03)
    assert second["output_tokens_per_second"] == 100
    assert comparison.medians("peer")[0]["tpot_p50"] == pytest.approx(0.15)  # of the two known


def test_ratios_pair_the_turns_of_a_round(comparison: Comparison) -> None:
    # 2, 3, 0.5 and 3, 2, 6: not the ratios of the medians, which are 2 and 3.33.
    assert comparison.ratios("ours", "peer") == [2, 3]


def test_no_ratio_to_a_server_that_gave_nothing() -> None:
    failed = Comparison([turn(0, "ours", (1, 1)), turn(0, "peer", (0, 1))])
    assert failed.ratios("ours", "peer") == [None, 1]


def test_text_and_json_show_every_point(comparison: Comparison) -> None:
    text = comparison.text(["peer"])
    assert "20.0 / 100" in text and "30.0 / 30.0" in text  # tokens/s, then ms
    assert "output tokens/s over peer" in text and "medians of 3 rounds" in text
    shown = comparison.as_json(["peer"])
    assert shown["points"] == list(POINTS)
    assert shown["ratios"] == {"peer": {"ours": [2, 3]}}
    assert len(shown["turns"]) == 6
