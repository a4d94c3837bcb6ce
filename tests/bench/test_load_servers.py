import http.client
import http.server
import sys
import threading
from collections.abc import Iterator

import pytest
from loadgen.lengths import InputError
from loadgen.servers import place, read_server, serving
from measure.processes import StartError

PEER = "peer=env A=1 server --port {port} --probe {free} --name 'a b'"


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_command_gets_its_ports() -> None:
    server = read_server(PEER)
    assert server.name == "peer" and not server.is_octavo
    command = place(server.command, 18001)
    assert command[:5] == ["env", "A=1", "server", "--port", "18001"]
    assert command[5] == "--probe" and command[6].isdecimal() and command[6] != "18001"
    assert command[7:] == ["--name", "a b"]


def test_octavo_needs_no_ports_in_its_command() -> None:
    assert read_server("mine=octavo serve --dtype float32").is_octavo


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("peer", "neither NAME=URL nor NAME=COMMAND"),
        ("=server {port}", "neither NAME=URL nor NAME=COMMAND"),
        ("peer=server --port 8000", "does not say where {port} goes"),
        ("peer=server 'a {port}", "No closing quotation"),
    ],
)
def test_what_is_no_server_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        read_server(text)


def test_a_running_server_is_used_as_it_is(address: str) -> None:
    with serving(read_server(f"peer={address}"), timeout=1) as url:
        assert url == address


def test_a_command_runs_for_one_turn() -> None:
    script = (
        "import http.server, sys; "
        "H = type('H', (http.server.BaseHTTPRequestHandler,), {"
        "'do_GET': lambda self: (self.send_response(200), self.end_headers())}); "
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()"
    )
    with serving(read_server(f'peer={sys.executable} -c "{script}" {{port}}'), timeout=60) as url:
        host = url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=10)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
    with pytest.raises(OSError):
        http.client.HTTPConnection(host, timeout=10).request("GET", "/health")


def test_a_command_that_ends_at_once_is_an_error() -> None:
    server = read_server(f"peer={sys.executable} -c 'raise SystemExit(3)' {{port}}")
    with pytest.raises(StartError, match="peer exited with 3"), serving(server, timeout=60):
        pytest.fail("the block must not run")
