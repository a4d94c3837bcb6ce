"""The service `octavo.v1.Generation` on grpc.aio, with health and reflection beside it."""

import asyncio
import contextlib
import importlib.metadata
import logging
import time
import typing
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from octavo.frontend.access import Certificate
from octavo.frontend.doorkeeper import Doorkeeper, KeyInterceptor
from octavo.frontend.errors import RETRY_SECONDS, RequestError
from octavo.frontend.generation import Generator
from octavo.frontend.grpc_messages import (
    Writer,
    prefix_list,
    read_chat,
    read_prefix,
    read_request,
    server_info,
)
from octavo.frontend.readable import ReadableMessages
from octavo.frontend.sample import Delta
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name
MAX_RECEIVE_BYTES = 16 << 20
MAX_SEND_BYTES = 64 << 20

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", MAX_SEND_BYTES),
    # Calls that wait for the event loop. gRPC cancels those beyond at random, without a word; ours are
    # refused with a reason, and are few: see `max_calls`.
    ("grpc.server.max_pending_requests", 1 << 20),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a second server
    # A client whose machine has vanished is noticed within a minute.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client may ping every second while it waits for an answer; who pings faster is cut off.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 5),
]


class GrpcApi:
    """Owner of the gRPC server."""

    def __init__(self, generator: Generator, max_calls: int, doorkeeper: Doorkeeper | None) -> None:
        """
        Args:
            max_calls: calls of all kinds at once; beyond it the answer is RESOURCE_EXHAUSTED.
            doorkeeper: asks for keys; None: anybody may call.
        """
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = grpc.aio.server(
            interceptors=[*([KeyInterceptor(doorkeeper)] if doorkeeper else []), ReadableMessages()],
            options=_OPTIONS,
            maximum_concurrent_rpcs=max_calls,
        )
        self._register(_Servicer(generator))

    @typing.no_type_check  # generated code and gRPC's companions have no types
    def _register(self, servicer: "_Servicer") -> None:
        generation_pb2_grpc.add_GenerationServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int, certificate: Certificate | None) -> None:
        """Serves until stopped, NOT_SERVING at first. Raises OSError when the port is taken."""
        await self.set_serving(False)
        try:
            if certificate is None:
                self._server.add_insecure_port(f"{host}:{port}")
            else:
                self._server.add_secure_port(f"{host}:{port}", _credentials(certificate))
        except RuntimeError as error:
            raise OSError(f"cannot bind {host}:{port}") from error
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What health checks answer from now on."""
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if serving else statuses.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, status)

    async def stop(self, grace: float) -> None:
        """Takes no new calls; running ones get `grace` seconds."""
        await self._server.stop(grace)


@typing.no_type_check  # gRPC has no types
def _credentials(certificate: Certificate) -> Any:
    pair = certificate.key.read_bytes(), certificate.cert.read_bytes()
    return grpc.ssl_server_credentials([pair])


class _Servicer(generation_pb2_grpc.GenerationServicer):
    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._created = int(time.time())

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # noqa: N802
        async with _call(context):
            self._check_model(request.model)
            with await self._generator.open([read_request(request)]) as batch:
                stream = batch.streams[0]
                writer = Writer(stream, self._generator.tokenizer)
                while news := await batch.take():
                    for i, (_, delta) in enumerate(news, start=1):
                        is_last = stream.drained and i == len(news)
                        await context.write(writer.message(delta, is_last))

    async def GenerateUnary(  # noqa: N802
        self, request: pb.GenerateRequest, context: Any
    ) -> pb.GenerateReply:
        async with _call(context):
            self._check_model(request.model)
            with await self._generator.open([read_request(request)]) as batch:
                deltas: list[Delta] = []
                while news := await batch.take():
                    deltas += [delta for _, delta in news]
                return Writer(batch.streams[0], self._generator.tokenizer).reply(deltas)

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: Any
    ) -> pb.TokenizeReply:
        async with _call(context):
            if request.WhichOneof("input") == "chat":
                ids = await self._generator.tokenize(read_chat(request.chat))
            else:
                special = not request.HasField("add_special_tokens") or request.add_special_tokens
                ids = await self._generator.tokenize(request.text, special)
            return pb.TokenizeReply(token_ids=ids)

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeReply:
        async with _call(context):
            ids = list(request.token_ids)
            text = await self._generator.detokenize(ids, request.skip_special_tokens)
            return pb.DetokenizeReply(text=text)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Any
    ) -> pb.GetModelInfoReply:
        async with _call(context):
            model, limits = self._generator.model, self._generator.limits()
            return pb.GetModelInfoReply(
                name=model.name,
                family=model.config["model_type"],
                max_model_len=limits.max_model_len,
                vocab_size=limits.vocab_size,
                eos_token_ids=model.eos_token_ids,
                has_chat_template=self._generator.template is not None,
                digest=model.digest,
                created=self._created,
            )

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoReply:
        async with _call(context):
            link = self._generator.link
            version = importlib.metadata.version("octavo")
            return server_info(await link.info(), version, link.incarnation)

    async def RegisterPrefix(  # noqa: N802
        self, request: pb.RegisterPrefixRequest, context: Any
    ) -> pb.RegisterPrefixReply:
        async with _call(context):
            prompt = read_prefix(request)
            pin = await self._generator.register_prefix(request.name, prompt, request.cache_salt)
            return pb.RegisterPrefixReply(pinned_tokens=pin.tokens, pinned_blocks=pin.blocks)

    async def UnregisterPrefix(  # noqa: N802
        self, request: pb.UnregisterPrefixRequest, context: Any
    ) -> pb.UnregisterPrefixReply:
        async with _call(context):
            await self._generator.unregister_prefix(request.name)
            return pb.UnregisterPrefixReply()

    async def ListPrefixes(  # noqa: N802
        self, request: pb.ListPrefixesRequest, context: Any
    ) -> pb.ListPrefixesReply:
        async with _call(context):
            return prefix_list(await self._generator.link.prefixes.list())

    def _check_model(self, name: str) -> None:
        if name and name != self._generator.model.name:
            raise RequestError(
                "NOT_FOUND",
                f"model {name!r:.200} is not served here; {self._generator.model.name!r} is",
                "model",
            )


@contextlib.asynccontextmanager
async def _call(context: Any) -> AsyncIterator[None]:
    """Ends the call with the right status: on our errors, at its deadline, on faults of ours."""
    try:
        async with asyncio.timeout(context.time_remaining()):
            yield
    except RequestError as error:
        await context.abort(grpc.StatusCode[error.code], error.message, _trailers(error))
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the call's deadline has passed")
    except Exception:
        log.exception("a call failed")
        await context.abort(grpc.StatusCode.INTERNAL, "the gateway failed this request")


def _trailers(error: RequestError) -> tuple[tuple[str, str], ...]:
    """When to retry: gRPC's own hint, and HTTP's for those who do not know it."""
    if not error.may_be_retried:
        return ()
    return (
        ("grpc-retry-pushback-ms", str(RETRY_SECONDS * 1000)),
        ("retry-after", str(RETRY_SECONDS)),
    )
