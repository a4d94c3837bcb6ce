"""Random and mutated bytes: frames of the planes, messages of gRPC, requests of HTTP."""

import json
import random
from collections.abc import Iterator
from typing import Any

import msgpack

from octavo.proto.plan import Fault, Result, Sampling
from octavo.proto.session import (
    Cancel,
    Failure,
    GatewayBeat,
    Hello,
    Info,
    InfoQuery,
    Join,
    ModelInfo,
    Pin,
    Pins,
    PinsQuery,
    Ready,
    Register,
    SampleState,
    Submit,
    Tokens,
    Unpin,
    WorkerBeat,
    WorkerBye,
)
from octavo.proto.wire import int32s

# What has made parsers of this kind fall over before: types, ends of ranges, sizes.
_ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 31,
    (1 << 63) - 1,
    -(1 << 63),
    (1 << 64) - 1,
    float("nan"),
    float("inf"),
    -1e308,
    "",
    "x" * 5000,
    "\ud7ff\x00\U0001f600",
    b"",
    b"\xff" * 3,
    b"\xff" * 4096,
    [],
    [[]],
    [None] * 1000,
    {},
    {"a": {"b": []}},
)
# Heads that promise more than follows: arrays, texts, bytes and maps of 2^32 - 1 items; an extension.
_PROMISES = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
)


def gateway_messages(incarnation: int, digest: str) -> list[bytes]:
    """What a gateway sends."""
    submit = Submit(
        gateway=incarnation,
        request=1,
        attempt=0,
        arrival=1e9,
        priority=100,  # behind everybody else
        prompt=int32s([1, 2, 3]),
        samples=[SampleState()],
        max_tokens=2,
        sampling=Sampling(seed=1),
    )
    messages = (
        Hello(incarnation=incarnation, model_digest=digest),
        submit,
        Cancel(gateway=incarnation, request=1, attempt=0),
        GatewayBeat(gateway=incarnation, newest=1, requests=int32s([1]), attempts=int32s([0])),
        InfoQuery(query=1),
        Pin(gateway=incarnation, query=2, name="fuzz", tokens=int32s(range(8))),
        Unpin(gateway=incarnation, query=3, name="fuzz"),
        PinsQuery(gateway=incarnation, query=4),
    )
    return [message.pack() for message in messages]


def worker_messages(incarnation: int) -> list[bytes]:
    """What a worker sends; its model is not the one that is served, so it is not taken in."""
    model = ModelInfo(
        name="other",
        family="llama",
        digest="fuzz",
        vocab_size=10,
        max_model_len=100,
        eos_token_ids=int32s([1]),
    )
    messages = (
        Register(incarnation=incarnation, device="cpu", engine="torch", model=model, tensor_parallel=7),
        Join(incarnation=incarnation, tensor_parallel=7, model=model),
        Ready(incarnation=incarnation, epoch=1),
        WorkerBeat(incarnation=incarnation, epoch=1, plans_done=1),
        Result(epoch=1, number=1, rank=0),
        Fault(epoch=1, number=1, rank=0, reason="fuzz"),
        WorkerBye(incarnation=incarnation),
    )
    return [message.pack() for message in messages]


def controlplane_messages_to_a_gateway(controlplane: int) -> list[bytes]:
    """What a control plane sends that is not the gateway's, so that nothing of it counts."""
    one = int32s([1])
    messages = (
        Tokens(
            controlplane=controlplane,
            requests=one,
            attempts=int32s([0]),
            samples=int32s([0]),
            offsets=int32s([0]),
            tokens=one,
        ),
        Failure(controlplane=controlplane, request=1, attempt=0, code="INTERNAL", reason="fuzz"),
        Info(query=99, controlplane=controlplane, ready=True, waiting=0, preempted=0, running=0),
        Pins(query=99),
    )
    return [message.pack() for message in messages]


def frames(rng: random.Random, real: list[bytes], count: int) -> Iterator[list[bytes]]:
    """So many messages, nearly all of one frame."""
    for _ in range(count):
        frame = mutated_frame(rng, rng.choice(real))
        yield [frame] if rng.random() < 0.98 else [frame, rng.randbytes(8)]


def mutated_frame(rng: random.Random, frame: bytes) -> bytes:
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.randrange(200))
    if kind < 0.6:
        fields = msgpack.unpackb(frame, raw=False)
        return bytes(msgpack.packb(_mutated_value(rng, fields), unicode_errors="surrogatepass"))
    return mutated_bytes(rng, frame)


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flipped bits, a cut, something in between, something promised."""
    kind = rng.randrange(4)
    place = rng.randrange(len(data) + 1)
    if kind == 0:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            if changed:
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind == 1:
        return data[:place]
    if kind == 2:
        return data[:place] + rng.randbytes(rng.randint(1, 40)) + data[place:]
    return data[:place] + rng.choice(_PROMISES) + data[place:]


def _mutated_value(rng: random.Random, value: Any) -> Any:
    """One thing inside is replaced, left out or doubled."""
    if not isinstance(value, list) or not value or rng.random() < 0.1:
        return rng.choice(_ODD)
    changed, place = list(value), rng.randrange(len(value))
    kind = rng.random()
    if kind < 0.1:
        del changed[place]
    elif kind < 0.2:
        changed.insert(place, changed[place])
    else:
        changed[place] = _mutated_value(rng, changed[place])
    return changed


# -- requests of clients ----------------------------------------------------------------------------

_BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "hello", "max_tokens": 1, "logprobs": 2, "stop": ["x"], "seed": 3}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1, "logit_bias": {"5": 1.5}, "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
)


def http_request(rng: random.Random, model: str) -> bytes:
    """A request that is wrong somewhere, or nearly so, with its head."""
    path, body = rng.choice(_BODIES)
    fields: dict[str, Any] = {"model": model, "stream": rng.random() < 0.3, **body}
    if rng.random() < 0.6:
        name = rng.choice([*fields, "messages", "prompt", "stop_token_ids", "top_p", "odd"])
        fields[name] = _json_value(rng)
    data = json.dumps(fields).encode()
    if rng.random() < 0.3:
        data = mutated_bytes(rng, data)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    whole = head.encode() + data
    return whole if rng.random() < 0.85 else mutated_bytes(rng, head.encode()) + data


def _json_value(rng: random.Random) -> Any:
    odd = [value for value in _ODD if not isinstance(value, bytes)]
    return rng.choice(
        [*odd, [1, "x"], [[1], [2]], ["a", None], {"role": 5}, [{"role": "user"}], 10**30]
    )


def grpc_call(rng: random.Random, real: list[tuple[str, bytes]]) -> tuple[str, bytes]:
    """A method and the bytes of its message."""
    method, message = rng.choice(real)
    return method, mutated_bytes(rng, message)
