"""The engines that tests serve with, and the proof of which one did."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from service import Service

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc


@dataclass(frozen=True)
class EngineCase:
    """One way for a worker to compute; the KV cache is float32 in all, as golden outputs need."""

    engine: str  # as --engine takes it, and as the service tells it
    block_size: int  # tokens
    quantization: str = "none"

    def __str__(self) -> str:
        kind = "" if self == EngineCase("torch", self.block_size) else f"-{self.quantization}"
        return f"{self.engine}{kind}-block{self.block_size}"

    @property
    def options(self) -> dict[str, object]:
        return {
            "engine": self.engine,
            "block_size": self.block_size,
            "quantization": self.quantization,
            "kv_dtype": "float32",
        }

    @property
    def loaded(self) -> str:
        """What the worker's log says of this engine and its weights."""
        if self.engine == "torch":
            kept = f"weights {self.quantization}, activations float32"
            weights = "float32" if self.quantization == "none" else kept
            return f"torch engine: {weights} on cpu, KV cache float32, native kernels"
        return f"OpenVINO engine: weights {self.quantization}, KV cache float32"


TORCH = {size: EngineCase("torch", size) for size in (8, 16, 32)}
TORCH_EXACT4 = EngineCase("torch", 16, "exact4")  # the default on CPUs
OPENVINO = {kind: EngineCase("openvino", 32, kind) for kind in ("none", "exact4")}
ENGINES = [*TORCH.values(), TORCH_EXACT4, *OPENVINO.values()]


def matrix(cases: Iterable[tuple[Any, ...]], short: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Cases as pytest's parameters; those not in `short` belong to the full matrix."""
    chosen = list(short)
    parameters = [
        pytest.param(
            *case, id="-".join(map(str, case)), marks=() if case in chosen else pytest.mark.full
        )
        for case in cases
    ]
    assert sum(not parameter.marks for parameter in parameters) == len(chosen)
    return parameters


@contextmanager
def serving(case: EngineCase, log: Path, options: dict[str, object]) -> Iterator[Service]:
    """A service on this engine. When it has answered, it must have been this engine that computed."""
    with Service(log, {**case.options, **options}) as service:
        yield service
        gang = gang_of(service)
        assert (gang.engine, gang.device, gang.block_size) == (case.engine, "cpu", case.block_size)
        assert gang.plans > 0
        assert case.loaded in log.read_text()


def gang_of(service: Service) -> Any:
    """The service's one gang, as it tells it."""
    with grpc.insecure_channel(service.target) as channel:
        stub = pb_grpc.GenerationStub(channel)
        (gang,) = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=30).gangs
        return gang
