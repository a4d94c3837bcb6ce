"""The running service gives the reference outputs, whatever the engine, blocks, chunks and overlap."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from engines import ENGINES, OPENVINO, TORCH, TORCH_EXACT4, EngineCase, matrix, serving
from service import Service
from shared_files import golden

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

CASES = [(engine, depth) for engine in ENGINES for depth in (1, 2)]
SHORT = [(TORCH[16], 2), (TORCH_EXACT4, 2), (OPENVINO["exact4"], 2)]


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    return golden("greedy")


@pytest.fixture(scope="module")
def chunked(
    lines: list[dict[str, Any]],  # no service is started where they are not there
    engine: EngineCase,
    depth: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Service]:
    options: dict[str, object] = {"pipeline_depth": depth, "prefill_chunk": 16, "max_model_len": 512}
    with serving(engine, tmp_path_factory.mktemp("golden") / "log", options) as running:
        yield running


def ask(stub: Any, line: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of one streamed greedy answer."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=line["prompt_token_ids"]),
        sampling=pb.SamplingParams(
            temperature=0.0, max_tokens=len(line["output_token_ids"]), logprobs=0
        ),
    )
    tokens: list[int] = []
    logprobs: list[float] = []
    for delta in stub.Generate(request, timeout=240):
        tokens += delta.token_ids
        logprobs += [entry.logprob for entry in delta.logprobs]
    return tokens, logprobs


def check(line: dict[str, Any], answer: tuple[list[int], list[float]]) -> None:
    tokens, logprobs = answer
    assert tokens == line["output_token_ids"]
    assert logprobs == pytest.approx(line["logprobs"], abs=1e-3)


@pytest.mark.system
@pytest.mark.parametrize(("engine", "depth"), matrix(CASES, SHORT), scope="module")
@pytest.mark.parametrize("together", [False, True], ids=["one-by-one", "all-at-once"])
def test_golden_greedy(lines: list[dict[str, Any]], chunked: Service, together: bool) -> None:
    assert len(lines) == 20
    with grpc.insecure_channel(chunked.target) as channel:
        stub = pb_grpc.GenerationStub(channel)
        with ThreadPoolExecutor(len(lines) if together else 1) as pool:
            answers = list(pool.map(lambda line: ask(stub, line), lines))
    for line, answer in zip(lines, answers, strict=True):
        check(line, answer)
    chunked.wait_until_idle()
