"""`/health`, `/ready` and `/metrics` of a process that serves no other HTTP.

A thread of its own answers, so that a long forward or a busy loop cannot make a live process look
dead. The callables it is given must be safe to call from another thread.
"""

import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import prometheus_client

log = logging.getLogger(__name__)


class ProbeServer:
    """Answers probes on host:port until closed. Raises OSError when the port is taken."""

    def __init__(
        self,
        host: str,
        port: int,
        ready: Callable[[], bool],
        registry: prometheus_client.CollectorRegistry,
    ) -> None:
        self._server = _Server((host, port), _handler(ready, registry))
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="probes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True


def _handler(
    ready: Callable[[], bool], registry: prometheus_client.CollectorRegistry
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            if self.path == "/health":
                self._answer(200, "text/plain", b"alive\n")
            elif self.path == "/ready":
                is_ready = ready()
                body = b"ready\n" if is_ready else b"not ready\n"
                self._answer(200 if is_ready else 503, "text/plain", body)
            elif self.path == "/metrics":
                body = prometheus_client.generate_latest(registry)
                self._answer(200, prometheus_client.CONTENT_TYPE_LATEST, body)
            else:
                self._answer(404, "text/plain", b"try /health, /ready or /metrics\n")

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            log.debug(format, *arguments)

    return Handler
