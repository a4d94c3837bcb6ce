"""The gateway's process: gRPC and HTTP in front, the link to the control plane behind."""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import signal
import socket

import uvloop

from octavo.common.curve import client_keys
from octavo.common.modelfiles import ModelError, ModelFiles, gguf_reader, open_model
from octavo.common.options import OptionError
from octavo.frontend.access import Access, read_access, warn_of_clear_text
from octavo.frontend.chat import open_chat_template
from octavo.frontend.doorkeeper import Doorkeeper, KeyMiddleware
from octavo.frontend.generation import Generator
from octavo.frontend.grpc_api import GrpcApi
from octavo.frontend.http_api import HttpApi, HttpServer, bind
from octavo.frontend.link import Link, LinkRefusedError
from octavo.frontend.metrics import Metrics
from octavo.frontend.options import GatewayOptions
from octavo.frontend.tokenizer import open_tokenizer

log = logging.getLogger("octavo.gateway")

_LAST_SECONDS = 2.0  # that answers get to leave once their requests are over
_POLL_SECONDS = 0.05
_OTHER_CALLS = 1024  # connections or calls at once beside live requests: probes, refusals, idle clients


class PortTakenError(Exception):
    """A port is not free; the text says which option chooses another."""


class Gateway:
    """Owner of the servers, the link, and of whether the gateway counts as ready."""

    def __init__(self, options: GatewayOptions, access: Access, model: ModelFiles) -> None:
        self._options, self._access = options, access
        self._changed = asyncio.Event()
        self._changed.set()
        self._draining = False
        self._link = Link(
            f"tcp://{options.controlplane_host}:{options.gateway_port}",
            model.digest,
            model.config["vocab_size"],
            options.max_live_requests,
            self._changed.set,
            client_keys(options.curve_keys, "gateway"),
        )
        self._metrics = Metrics()
        self._generator = Generator(
            dataclasses.replace(model, gguf={}),
            open_tokenizer(model),
            open_chat_template(model),
            self._link,
            self._metrics,
            options,
        )
        most = options.max_live_requests + _OTHER_CALLS
        doorkeeper = Doorkeeper(access.keys, self._metrics) if access.keys else None
        app = HttpApi(self._generator, self._is_ready).app
        self._grpc = GrpcApi(self._generator, most, doorkeeper)
        self._http = HttpServer(
            KeyMiddleware(app, doorkeeper) if doorkeeper else app,
            most,
            access.certificate,
        )
        self._add_gauges()

    async def run(self, http_socket: socket.socket, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then lets running requests finish.

        Raises:
            OSError: the gRPC port was taken in the last moment.
            LinkRefusedError: the control plane does not want this gateway.
        """
        options = self._options
        try:
            await self._grpc.start(options.grpc_host, options.grpc_port, self._access.certificate)
            log.info(
                "serving gRPC on %s:%d and HTTP%s on %s:%d",
                *(options.grpc_host, options.grpc_port, "S" if self._access.certificate else ""),
                *(options.http_host, options.http_port),
            )
            warn_of_clear_text(options)
            await self._run(http_socket, stop)
        finally:
            self._link.shut_down()
            self._generator.close()

    async def _run(self, http_socket: socket.socket, stop: asyncio.Event) -> None:
        link = asyncio.ensure_future(self._link.run())
        http = asyncio.ensure_future(self._http.serve([http_socket]))
        others = [asyncio.ensure_future(self._report_health()), asyncio.ensure_future(stop.wait())]
        try:
            done, _ = await asyncio.wait((link, http, *others), return_when=asyncio.FIRST_COMPLETED)
            grace = 0.0 if link in done else self._options.drain_timeout
            await self._drain(http, grace)
            for task in done:
                task.result()
        finally:
            for task in (link, *others):
                task.cancel()
            await asyncio.gather(link, *others, return_exceptions=True)

    def _is_ready(self) -> bool:
        return self._link.ready and not self._draining

    async def _report_health(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._grpc.set_serving(self._is_ready())

    async def _drain(self, http: asyncio.Future[None], grace: float) -> None:
        """No new requests; running ones get `grace` seconds, then they end with UNAVAILABLE.

        The ports stay open until then, so that probes and new requests get an answer.
        """
        self._draining = True
        self._generator.stop_taking()
        await self._grpc.set_serving(False)
        if self._link.live_count:
            log.info("stopping: %d requests may finish within %g s", self._link.live_count, grace)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._until_idle()
        if left := self._link.fail_all(
            "the gateway was stopped before the answer was whole; ask again"
        ):
            log.warning("%d requests were not finished in time and ended with UNAVAILABLE", left)
        self._http.should_exit = True
        await asyncio.gather(self._grpc.stop(_LAST_SECONDS), http)

    async def _until_idle(self) -> None:
        while self._generator.live_count:
            await asyncio.sleep(_POLL_SECONDS)

    def _add_gauges(self) -> None:
        link, gauge = self._link, self._metrics.gauge
        gauge("octavo_ready", "1 while the service can serve", lambda: self._is_ready())
        gauge(
            "octavo_resubmitted_requests", "Requests that had to be sent again", lambda: link.attempts
        )
        gauge("octavo_refused_messages", "Malformed messages", lambda: link.malformed)


def _bind(what: str, host: str, port: int, flag: str) -> socket.socket:
    try:
        return bind(host, port)
    except OSError as error:
        raise PortTakenError(
            f"{what} port {port} on {host} cannot be had ({error.strerror}): choose another with {flag}"
        ) from error


def _forget_model_file() -> None:
    """A GGUF file's vocabulary is hundreds of megabytes of small objects, of no more use here."""
    gguf_reader.cache_clear()
    gc.collect()
    gc.freeze()  # what is left stays; collections need not look at it again


async def _serve(options: GatewayOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    access = read_access(options)
    with _bind("HTTP", options.http_host, options.http_port, "--http-port") as http_socket:
        _bind("gRPC", options.grpc_host, options.grpc_port, "--grpc-port").close()  # gRPC binds itself
        gateway = Gateway(options, access, open_model(options.model, options.served_model_name))
        _forget_model_file()
        await gateway.run(http_socket, stop)


def main(options: GatewayOptions) -> int:
    """Runs the gateway until SIGTERM or SIGINT. Returns the exit status."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(options))
    except (ModelError, OptionError, PortTakenError) as error:
        log.error("%s", error)
        return 1
    except LinkRefusedError as error:
        log.error("the control plane refused this gateway: %s", error)
        return 1
    return 0
