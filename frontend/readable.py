"""gRPC messages that are none: the caller's fault, and no traceback in the log."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

_Behavior = Callable[[Any, Any], Awaitable[Any]]
_UNREADABLE = object()


class ReadableMessages(grpc.aio.ServerInterceptor):
    """Answers bytes that are not the method's message with INVALID_ARGUMENT."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}  # of methods that exist

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        method = handler_call_details.method
        if method not in self._handlers:
            handler = await continuation(handler_call_details)
            if handler is None or handler.request_streaming:
                return handler
            self._handlers[method] = _checked(handler)
        return self._handlers[method]


def _checked(handler: Any) -> Any:
    streams = handler.response_streaming
    make: Any = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
    behavior: _Behavior = handler.unary_stream if streams else handler.unary_unary

    def read(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except DecodeError:
            return _UNREADABLE

    async def answer(request: Any, context: Any) -> Any:
        if request is _UNREADABLE:
            text = f"the message is no {behavior.__name__} request of this service's schema"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        return await behavior(request, context)

    return make(answer, read, handler.response_serializer)
