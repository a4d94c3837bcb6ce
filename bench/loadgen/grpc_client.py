"""Octavo's own API: streams over gRPC, and the server's state."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from loadgen.records import Record, RequestError
from loadgen.workload import Request
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc

_INFO_TIMEOUT = 10.0  # seconds
_OPTIONS = [("grpc.max_receive_message_length", 16 * 1024 * 1024)]


class GrpcClient:
    """A client of one Octavo gateway; all requests share one channel.

    Args:
        target: host and port.
        model: None asks the gateway.
    """

    def __init__(self, target: str, model: str | None, temperature: float) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._stub: Any = rpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        self._model = model
        self._temperature = temperature

    async def model(self) -> str:
        if self._model is None:
            async with _failures():
                info = await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=_INFO_TIMEOUT)
            self._model = str(info.name)
        return self._model

    async def generate(self, request: Request, record: Record) -> None:
        call = self._stub.Generate(self._message(await self.model(), request))
        has_finished = False
        try:
            async with _failures():
                async for delta in call:
                    has_finished = _read(delta, record) or has_finished
        finally:
            call.cancel()  # nothing to do after a whole stream
        if not has_finished:
            raise RequestError("cut off", "the stream ended without a finish reason")

    async def server_info(self) -> pb.GetServerInfoReply:
        """Raises RequestError."""
        async with _failures():
            info: pb.GetServerInfoReply = await self._stub.GetServerInfo(
                pb.GetServerInfoRequest(), timeout=_INFO_TIMEOUT
            )
        return info

    async def close(self) -> None:
        await self._channel.close()

    def _message(self, model: str, request: Request) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            model=model,
            token_ids=pb.TokenIds(ids=request.prompt),
            sampling=pb.SamplingParams(
                temperature=self._temperature, max_tokens=request.output_tokens, ignore_eos=True
            ),
        )


def _read(delta: pb.GenerateDelta, record: Record) -> bool:
    """Records a delta; tells whether it ends its sample."""
    if delta.token_ids:
        record.delta(time.perf_counter(), len(delta.token_ids))
    if delta.HasField("usage"):
        usage = delta.usage
        record.usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
    return bool(delta.finish_reason)


@asynccontextmanager
async def _failures() -> AsyncIterator[None]:
    """gRPC's errors as RequestError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise RequestError(f"grpc {error.code().name}", error.details() or "") from error
