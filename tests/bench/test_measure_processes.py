import socket
import sys
import time
from pathlib import Path

import measure.processes
import pytest
from measure.processes import Process, StartError, free_ports, octavo_command, running

BENCH = Path(measure.processes.__file__).parents[1]


def test_free_ports_differ_and_can_be_bound() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports[3]))


def test_a_process_that_ends_early_shows_its_log() -> None:
    process = Process("octavo no-such-command", octavo_command("no-such-command", []))
    try:
        with pytest.raises(StartError, match="octavo no-such-command exited with") as failure:
            process.wait_for(free_ports(1)[0], "/health", timeout=60)
        assert len(str(failure.value).splitlines()) > 1
    finally:
        process.stop()


def test_a_command_that_does_not_exist_is_named() -> None:
    with pytest.raises(StartError, match="peer: /no/such/server --port 1: No such file"):
        Process("peer", ["/no/such/server", "--port", "1"])


def test_stopping_a_process_stops_its_children() -> None:
    script = (
        "import signal, subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "signal.pause()"
    )
    with running("parent", [sys.executable, "-c", script]) as process:
        while len(family := process.family()) < 2:
            time.sleep(0.02)
    assert not any(member.is_running() for member in family)


def test_sigterm_stops_what_a_benchmark_has_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    script = (
        f"import sys, time; sys.path.insert(0, {str(BENCH)!r})\n"
        "from pathlib import Path; from measure.processes import running, stop_on_sigterm\n"
        "stop_on_sigterm()\n"
        "with running('child', [sys.executable, '-c', 'import time; time.sleep(60)']):\n"
        f"    Path({str(started)!r}).touch(); time.sleep(60)\n"
    )
    with running("bench", [sys.executable, "-c", script]) as bench:
        while not started.exists():
            time.sleep(0.02)
        parent, child = bench.family()
        parent.terminate()
        assert parent.wait(30) is not None
        assert not child.is_running()
