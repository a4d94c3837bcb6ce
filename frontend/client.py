"""A small Python client of the gRPC API.

with Client("127.0.0.1:50051") as client:
    for delta in client.generate("Once upon a time", max_tokens=20):
        print(delta.text, end="")
"""

import typing
from collections.abc import Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

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
    """A connection to a gateway. Every method raises ClientError."""

    def __init__(self, target: str, api_key: str | None = None, tls_ca: Path | None = None) -> None:
        """
        Args:
            target: ``host:port``.
            api_key: what the gateway asks its clients for, if it does.
            tls_ca: PEM file of the certificates to trust; with it the connection speaks TLS.

        Raises OSError where the file cannot be read.
        """
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        self._channel = _open_channel(target, tls_ca)
        self._stub: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]

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
        request = make_request(prompt, echo=echo, **sampling)
        call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise _client_error(error) from error
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

    def close(self) -> None:
        self._channel.close()

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


@typing.no_type_check  # gRPC has no types
def _open_channel(target: str, tls_ca: Path | None) -> Any:
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
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
