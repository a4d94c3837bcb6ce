import socket

import pytest
from measure.processes import Process, StartError, free_ports


def test_free_ports_differ_and_can_be_bound() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports[3]))


def test_a_process_that_ends_early_shows_its_log() -> None:
    process = Process("no-such-command", [])
    try:
        with pytest.raises(StartError, match="octavo no-such-command exited with") as failure:
            process.wait_for(free_ports(1)[0], "/health", timeout=60)
        assert len(str(failure.value).splitlines()) > 1
    finally:
        process.stop()
