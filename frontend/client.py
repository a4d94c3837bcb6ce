"""A small Python client of the gRPC API.

with Client("127.0.0.1:50051") as client:
    for delta in client.generate("Once upon a time", max_tokens=20):
        print(delta.text, end="")
"""

import time
import typing
from collections.abc import Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from octavo.frontend.resuming import Progress
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc

MAX_MESSAGE_BYTES = 64 << 20

Prompt = str | Sequence[int] | Sequence[tuple[str, str]]


class ClientError(Exception):
    """A call that failed.

    Attributes:
        code: name of the gRPC status code.
        message: what the service, or gRPC itself, says.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def is_unreachable(self) -> bool:
        """Whether nothing listens at the target."""
        return self.code == "UNAVAILABLE" and "connect" in self.message.lower()


class Client:
    """A connection to a gateway, or to one of several. Every method raises ClientError.

    A stream whose gateway goes away is continued, on the same or another gateway: its reader sees no
    gap and no repeat.
    """

    def __init__(
        self,
        target: str | Sequence[str],
        api_key: str | None = None,
        tls_ca: Path | None = None,
        patience: float = 30.0,
    ) -> None:
        """
        Args:
            target: ``host:port`` of a gateway, or of several that share a control plane.
            api_key: what the gateway asks its clients for, if it does.
            tls_ca: PEM file of the certificates to trust; with it the connection speaks TLS.
            patience: seconds for which a stream that has begun looks for a gateway to go on with.

        Raises OSError where the file cannot be read.
        """
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        targets = [target] if isinstance(target, str) else list(target)
        if not targets:
            raise ValueError("target: must name at least one gateway")
        self._patience = patience
        self._channels = [_open_channel(target, tls_ca) for target in targets]
        self._stubs: list[Any] = [generation_pb2_grpc.GenerationStub(c) for c in self._channels]  # type: ignore[no-untyped-call]
        self._current = 0  # the gateway that is asked first

    def generate(
        self, prompt: Prompt, *, echo: bool = False, timeout: float | None = None, **sampling: Any
    ) -> Generator[pb.GenerateDelta, None, None]:
        """Deltas as they come.

        Args:
            prompt: a text, token ids, or chat messages as (role, content) pairs.
            echo: begin with the prompt's text.
            timeout: seconds until the call is given up, by the service too.
            sampling: fields of SamplingParams.

        Closing the iterator cancels the request.
        """
        progress = Progress(make_request(prompt, echo=echo, **sampling))
        deadline = None if timeout is None else time.monotonic() + timeout
        retries = _Retries(len(self._stubs), self._patience)
        while not progress.is_whole:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            call = self._stub.Generate(progress.request(), timeout=left, metadata=self._metadata)
            try:
                for delta in call:
                    retries.succeeded()
                    yield progress.take(delta)
            except grpc.RpcError as error:
                failure = _client_error(error)
                self._current += 1
                if failure.code != "UNAVAILABLE" or not retries.wait(progress.has_begun):
                    raise failure from error
            finally:
                call.cancel()

    def model_info(self, timeout: float = 10.0) -> pb.GetModelInfoReply:
        reply: pb.GetModelInfoReply = self._call(
            self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout
        )
        return reply

    def server_info(self, timeout: float = 10.0) -> pb.GetServerInfoReply:
        reply: pb.GetServerInfoReply = self._call(
            self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout
        )
        return reply

    def register_prefix(
        self, name: str, prompt: str | Sequence[int], cache_salt: str = "", timeout: float = 60.0
    ) -> pb.RegisterPrefixReply:
        """Computes a text or token ids once and keeps them until unregistered, under a name."""
        request = pb.RegisterPrefixRequest(name=name, cache_salt=cache_salt)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        reply: pb.RegisterPrefixReply = self._call(self._stub.RegisterPrefix, request, timeout)
        return reply

    def unregister_prefix(self, name: str, timeout: float = 10.0) -> None:
        self._call(self._stub.UnregisterPrefix, pb.UnregisterPrefixRequest(name=name), timeout)

    def list_prefixes(self, timeout: float = 10.0) -> pb.ListPrefixesReply:
        reply: pb.ListPrefixesReply = self._call(
            self._stub.ListPrefixes, pb.ListPrefixesRequest(), timeout
        )
        return reply

    @property
    def _stub(self) -> Any:
        return self._stubs[self._current % len(self._stubs)]

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, method: Any, request: Any, timeout: float) -> Any:
        try:
            return method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _client_error(error) from error


class _Retries:
    """When to ask again: each gateway once at first; for `patience` seconds once a stream has begun."""

    def __init__(self, gateways: int, patience: float) -> None:
        self._gateways, self._patience = gateways, patience
        self.succeeded()

    def succeeded(self) -> None:
        self._failures, self._since = 0, 0.0

    def wait(self, has_begun: bool) -> bool:
        """Waits before the next try. False: there is none."""
        self._since = self._since or time.monotonic()
        self._failures += 1
        if not has_begun:
            return self._failures < self._gateways
        if time.monotonic() - self._since > self._patience:
            return False
        if self._failures % self._gateways == 0:
            time.sleep(min(0.1 * 2 ** (self._failures // self._gateways), 2.0))
        return True


@typing.no_type_check  # gRPC has no types
def _open_channel(target: str, tls_ca: Path | None) -> Any:
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A gateway that has vanished or hangs is left for another one.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
    ]
    if tls_ca is None:
        return grpc.insecure_channel(target, options=options)
    credentials = grpc.ssl_channel_credentials(tls_ca.read_bytes())
    return grpc.secure_channel(target, credentials, options=options)


def make_request(prompt: Prompt, *, echo: bool = False, **sampling: Any) -> pb.GenerateRequest:
    """The message that asks for this."""
    request = pb.GenerateRequest(echo=echo, sampling=pb.SamplingParams(**sampling))
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], tuple):
        messages = [pb.ChatMessage(role=role, content=text) for role, text in prompt]  # type: ignore[misc]
        request.chat.messages.extend(messages)
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
    return request


def _client_error(error: Any) -> ClientError:
    return ClientError(error.code().name, error.details() or "")
