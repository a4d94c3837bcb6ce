import json
from pathlib import Path

import pytest
from loadgen.lengths import Lengths
from loadgen.options import Options, Point, read_options
from measure.machine import describe, write_json

HTTP = ["--url", "http://127.0.0.1:1"]


def read(*arguments: str) -> Options:
    return read_options([*HTTP, *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --url or --grpc"),
        ([*HTTP, "--idle-check"], "--idle-check needs --grpc"),
        (["--grpc", "h:1", "--extra-body", "{}x"], "is not JSON"),
        (["--grpc", "h:1", "--extra-body", '{"a": 1}'], "--extra-body needs --url"),
        ([*HTTP, "--extra-body", "[1]"], "is not a JSON object"),
        ([*HTTP, "--arrival", "poisson"], "--arrival poisson needs --rate"),
        ([*HTTP, "--clients", "2", "--rate", "1"], "are closed loops"),
        ([*HTTP, "--clients", "0"], "0 is below the minimum of 1"),
        ([*HTTP, "--sweep", "1,4", "--sweep-requests", "4"], "as many --sweep-requests"),
        ([*HTTP, "--sweep-requests", "4"], "--sweep-requests needs --sweep"),
        ([*HTTP, "--synthetic", "3"], "is not two integers"),
        ([*HTTP, "--synthetic", "3,x"], "'x' is not an integer"),
        ([*HTTP, "--timeout", "inf"], "is not a finite number"),
        ([*HTTP, "--temperature", "nan"], "is not a finite number"),
        ([*HTTP, "--lengths", "a", "--trace", "b"], "not allowed with"),
        ([*HTTP, "--vocab", "20"], "20 is below the minimum of 21"),
    ],
)
def test_wrong_options_say_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        read_options(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_defaults_are_an_open_loop_of_like_requests() -> None:
    options = read()
    assert options.source.synthetic == Lengths(128, 64)
    assert (options.arrival.kind, options.points) == ("all", [Point(32, None)])


def test_a_trace_arrives_as_it_did_unless_told_otherwise() -> None:
    assert read("--trace", "t.csv").arrival.kind == "trace"
    assert read("--trace", "t.csv", "--arrival", "all").arrival.kind == "all"


def test_a_sweep_is_one_point_for_each_client_count() -> None:
    options = read("--sweep", "1,4", "--sweep-requests", "4,12")
    assert options.points == [Point(4, 1), Point(12, 4)]
    assert read("--sweep", "1,4", "--requests", "9").points == [Point(9, 1), Point(9, 4)]


def test_a_report_carries_machine_and_configuration(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    write_json(str(path), describe({"runs": [1]}, {"seed": 3}))
    report = json.loads(path.read_text())
    assert report["runs"] == [1] and report["config"] == {"seed": 3}
    assert report["machine"]["cores"] >= 1 and report["machine"]["memory_bytes"] > 1 << 20
    assert {"date", "commit"} <= set(report)
