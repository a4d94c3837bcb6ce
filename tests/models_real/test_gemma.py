"""Gemma 3 270M from its GGUF file, served by real processes, beside transformers with the same file."""

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from engines import OPENVINO, TORCH, EngineCase, serving
from gemma_prompts import PROMPTS
from service import Service
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.common.modelfiles import open_model
from octavo.frontend.detokenizer import Detokenizer
from octavo.frontend.tokenizer import Tokenizer, open_tokenizer
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

NUM_TOKENS = 48
MARGIN = 1e-3  # between the logits of the best and the second-best token


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    tokens: list[int]
    text: str


@pytest.fixture(scope="module")
def reference(gemma: Path) -> Any:
    """The model in float32, dequantised by transformers."""
    return AutoModelForCausalLM.from_pretrained(
        str(gemma.parent), gguf_file=gemma.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def reference_tokenizer(gemma: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(gemma.parent), gguf_file=gemma.name)


@pytest.fixture(scope="module")
def tokenizer(gemma: Path) -> Tokenizer:
    return open_tokenizer(open_model(str(gemma)))


@pytest.fixture(scope="module", params=[TORCH[16], *OPENVINO.values()], ids=str)
def answers(
    request: pytest.FixtureRequest, gemma: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Answer]]:
    """What a service on each engine says to all prompts at once."""
    case: EngineCase = request.param
    options: dict[str, object] = {"model": gemma, "max_model_len": 2048, "prefill_chunk": 128}
    with serving(case, tmp_path_factory.mktemp("gemma") / "log", options) as service:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            given = list(pool.map(functools.partial(ask, service), PROMPTS.values()))
        service.wait_until_idle()
        yield dict(zip(PROMPTS, given, strict=True))


def ask(service: Service, text: str) -> Answer:
    """A greedy answer, streamed."""
    request = pb.GenerateRequest(
        text=text,
        sampling=pb.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS),
    )
    with grpc.insecure_channel(service.target) as channel:
        deltas = list(pb_grpc.GenerationStub(channel).Generate(request, timeout=600))
    return Answer(
        prompt=[i for delta in deltas for i in delta.prompt_token_ids],
        tokens=[i for delta in deltas for i in delta.token_ids],
        text="".join(delta.text for delta in deltas),
    )


@torch.inference_mode()
def logits_of(reference: Any, answer: Answer) -> torch.Tensor:
    """Of each of the answer's tokens, given all before it: ``[tokens, vocabulary]``."""
    ids = torch.tensor([answer.prompt + answer.tokens])
    kept = len(answer.tokens) + 1
    logits: torch.Tensor = reference(ids, use_cache=False, logits_to_keep=kept).logits[0, :-1]
    return logits


def test_greedy_answers(answers: dict[str, Answer], reference: Any) -> None:
    """Wherever transformers, given the same tokens before, is sure of the next one, it is that one. By
    induction, an answer of which it is sure everywhere is its own greedy answer."""
    sure_of_all, undecided, total, least = 0, 0, 0, float("inf")
    for name, answer in answers.items():
        logits = logits_of(reference, answer)
        best = logits.topk(2, dim=-1)
        margins = best.values[:, 0] - best.values[:, 1]
        sure, least = margins >= MARGIN, min(least, float(margins.min()))
        same = best.indices[:, 0] == torch.tensor(answer.tokens)
        assert same[sure].all(), (name, int((sure & ~same).nonzero()[0]))
        sure_of_all += bool(sure.all())
        undecided, total = undecided + int((~sure).sum()), total + len(sure)
    print(f"{total} tokens, {undecided} of margins below {MARGIN}; the least is {least:.4f}; ", end="")
    print(f"{sure_of_all} answers of {len(answers)} are those of transformers")
    assert total > 0.8 * NUM_TOKENS * len(PROMPTS)
    assert undecided < total // 50


def test_prompts_and_texts(answers: dict[str, Answer], reference_tokenizer: Any) -> None:
    for name, answer in answers.items():
        assert answer.prompt == reference_tokenizer(PROMPTS[name]).input_ids
        assert answer.text == reference_tokenizer.decode(answer.tokens, skip_special_tokens=True)
    assert max(len(answer.prompt) for answer in answers.values()) > 512  # more than a window


def test_tokenizer(tokenizer: Tokenizer, reference_tokenizer: Any) -> None:
    odd = [
        "",
        " ",
        "\n\n\n" * 12,
        " " * 70 + "x",
        "\t\tif a:\r\n\t\t\treturn b",
        "▁▁ a ▁b",
        "<0x0A> \x00 \ufffd",
        "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
        "<h1>a</h1><unused7><eos>",
        "𝒳 ﬁ ½ ∑ \U0010fffd",
        "नमस्ते สวัสดี שלום",
    ]
    for text in [*PROMPTS.values(), *odd]:
        ids = tokenizer.encode(text)
        assert ids == reference_tokenizer(text).input_ids
        assert tokenizer.encode(text, False) == ids[1:]
        assert tokenizer.decode(ids) == reference_tokenizer.decode(ids)
        stream = Detokenizer(tokenizer.vocabulary, True)
        pushed = "".join([*map(stream.push, ids), stream.flush()])
        assert pushed == reference_tokenizer.decode(ids, skip_special_tokens=True)
