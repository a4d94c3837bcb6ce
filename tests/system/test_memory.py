"""Memory under pressure, sharing and reuse, over the real processes.

The oracle is the unpressured run: golden outputs, or the same request alone in a large pool.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from asking import Answer, collect, request, stream, whole
from engines import ENGINES, OPENVINO, TORCH, EngineCase, matrix, serving
from margins import sampled_margins
from reference_model import reference_model
from service import Service, wait_for
from shared_files import golden

from octavo.common.modelfiles import open_model
from octavo.frontend.tokenizer import open_tokenizer
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

pytestmark = pytest.mark.system

TEXT = "Once upon a time, in a small village by the sea,"
# Prompts and seeds whose sampled outputs are decided by at least 3e-3 at every token.
SEEDED = [(golden_index, seed) for golden_index, seed in ((0, 11), (1, 12), (2, 13))]
MARGIN = 3e-3
OUTPUTS = 16  # tokens of a sampled answer


def stub_of(service: Service) -> Any:
    return pb_grpc.GenerationStub(grpc.insecure_channel(service.target))


def together(service: Service, messages: list[Any]) -> list[Answer]:
    """Answers to all messages, sent at once."""
    stub = stub_of(service)
    with ThreadPoolExecutor(len(messages)) as pool:
        return list(pool.map(lambda message: stream(stub, message), messages))


def greedy(line: dict[str, Any]) -> Any:
    return request(
        line["prompt_token_ids"], temperature=0.0, max_tokens=len(line["output_token_ids"]), logprobs=0
    )


def beam(line: dict[str, Any]) -> Any:
    return request(
        line["prompt_token_ids"],
        use_beam_search=True,
        n=line["num_beams"],
        max_tokens=line["max_new_tokens"],
        length_penalty=line["length_penalty"],
        early_stopping="false",
    )


def preemptions(service: Service, kind: str) -> int:
    return int(service.metrics()[f'octavo_preemptions_total{{kind="{kind}"}}'])


# -- golden greedy under pressure -------------------------------------------------------------------

MODES = ("swap", "recompute")
PRESSURE = [
    (mode, engine, depth) for mode in (*MODES, "auto") for engine in ENGINES for depth in (1, 2)
]


def pressed(mode: str, engine: EngineCase, depth: int, tokens: int) -> dict[str, object]:
    """Options for a device pool of that many tokens, and a CPU pool that takes all that is swapped."""
    return {
        "preemption": mode,
        "pipeline_depth": depth,
        "num_kv_blocks": tokens // engine.block_size,
        "swap_blocks": 4000 // engine.block_size,
    }


@pytest.mark.parametrize(
    ("mode", "engine", "depth"),
    matrix(PRESSURE, [("swap", TORCH[16], 2), ("recompute", OPENVINO["exact4"], 2)]),
)
def test_golden_greedy_under_pressure(
    mode: str, engine: EngineCase, depth: int, tmp_path: Path
) -> None:
    lines = golden("greedy")
    assert len(lines) == 20
    options = {**pressed(mode, engine, depth, tokens=320), "prefill_chunk": 64}
    with serving(engine, tmp_path / "log", options) as service:
        answers = together(service, [greedy(line) for line in lines])
        metrics = service.metrics()
        counts = {kind: metrics[f'octavo_preemptions_total{{kind="{kind}"}}'] for kind in MODES}
        service.wait_until_idle()
    assert sum(counts.values()) >= 10, counts
    assert mode == "auto" or counts[mode] >= 10, counts
    for line, answer in zip(lines, answers, strict=True):
        assert answer.samples[0].token_ids == line["output_token_ids"]
        logprobs = [entry.logprob for entry in answer.samples[0].logprobs]
        assert logprobs == pytest.approx(line["logprobs"], abs=1e-3)
        assert answer.counts[2] == len(line["output_token_ids"])


# -- golden beam search -----------------------------------------------------------------------------


def check_beams(line: dict[str, Any], answer: Answer) -> None:
    """The best hypothesis is the reference's, and so is every score."""
    pad = line["pad_token_id"]
    best = answer.samples[0].token_ids
    wanted = line["sequences"][0]
    assert best == wanted[: len(best)] and all(token == pad for token in wanted[len(best) :])
    assert len(answer.samples) == line["num_beams"]
    scores = [answer.samples[rank].score for rank in range(line["num_beams"])]
    assert scores == pytest.approx(line["scores"], abs=1e-3)


@pytest.mark.parametrize(
    ("engine", "depth"),
    matrix(
        [(engine, depth) for engine in ENGINES for depth in (1, 2)],
        [(TORCH[16], 2), (OPENVINO["exact4"], 2)],
    ),
)
def test_golden_beam_search(engine: EngineCase, depth: int, tmp_path: Path) -> None:
    lines = golden("beam")
    assert len(lines) == 20
    options: dict[str, object] = {"pipeline_depth": depth, "prefill_chunk": 16}
    with serving(engine, tmp_path / "log", options) as service:
        for line, answer in zip(lines, together(service, [beam(x) for x in lines]), strict=True):
            check_beams(line, answer)
        service.wait_until_idle()


@pytest.mark.parametrize(
    ("mode", "engine", "depth"),
    matrix(
        [(mode, engine, depth) for mode in MODES for engine in ENGINES for depth in (1, 2)],
        [("swap", TORCH[16], 2), ("swap", OPENVINO["exact4"], 2)],
    ),
)
def test_golden_beam_search_under_pressure(
    mode: str, engine: EngineCase, depth: int, tmp_path: Path
) -> None:
    lines = golden("beam")
    with serving(engine, tmp_path / "log", pressed(mode, engine, depth, tokens=768)) as service:
        for line, answer in zip(lines, together(service, [beam(x) for x in lines]), strict=True):
            check_beams(line, answer)
        assert preemptions(service, mode) >= 10
        service.wait_until_idle()


@pytest.fixture(scope="module")
def two_endings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small random model whose beams meet two EOS ids, as a folder, and in the reference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    files = open_model("demo")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=files.config["vocab_size"],
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.tensor([BEAM_PROMPT])
    endings = []
    for width, step in ((4, 2), (2, 3)):  # what the beams of each width meet on their way
        free = model.generate(
            prompt,
            num_beams=width,
            max_new_tokens=10,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        endings.append(int(free[0, len(BEAM_PROMPT) + step]))
    model.generation_config.eos_token_id = model.config.eos_token_id = endings
    model.generation_config.pad_token_id = PAD
    folder = tmp_path_factory.mktemp("two-endings")
    model.save_pretrained(folder)
    open_tokenizer(files)._backend.save(str(folder / "tokenizer.json"))
    return folder, model


BEAM_PROMPT = [301, 4022, 77, 9008, 512]
PAD = 1


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("early_stopping", ["true", "false", "never"])
def test_beam_search_with_two_eos_ids(
    two_endings: tuple[Path, Any], width: int, early_stopping: str, tmp_path: Path
) -> None:
    folder, model = two_endings
    settings = {"true": True, "false": False, "never": "never"}
    wanted = model.generate(
        torch.tensor([BEAM_PROMPT]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=14,
        do_sample=False,
        length_penalty=0.1,
        early_stopping=settings[early_stopping],
        return_dict_in_generate=True,
        output_scores=True,
    )
    with Service(tmp_path / "log", {"model": folder}) as service:
        message = request(
            BEAM_PROMPT,
            use_beam_search=True,
            n=width,
            max_tokens=14,
            length_penalty=0.1,
            early_stopping=early_stopping,
        )
        answer = stream(stub_of(service), message)
    for rank in range(width):
        tokens = answer.samples[rank].token_ids
        outputs = wanted.sequences[rank, len(BEAM_PROMPT) :].tolist()
        assert tokens == outputs[: len(tokens)] and set(outputs[len(tokens) :]) <= {PAD}
        assert answer.samples[rank].score == pytest.approx(
            float(wanted.sequences_scores[rank]), abs=1e-3
        )
    finishes = {state.finish_reason for state in answer.samples.values()}
    assert "stop" in finishes


# -- one roomy service for the rest -----------------------------------------------------------------


@pytest.fixture(
    scope="module", params=matrix([(TORCH[16],), (OPENVINO["exact4"],)], short=[(TORCH[16],)])
)
def engine(request: pytest.FixtureRequest) -> Any:
    """The engine of the roomy service; tests of several engines give their own."""
    return request.param


@pytest.fixture(scope="module")
def roomy(engine: EngineCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(engine, tmp_path_factory.mktemp("roomy") / "log", {}) as running:
        yield running


def sampled(index: int, seed: int, n: int = 4) -> Any:
    prompt = golden("greedy")[index]["prompt_token_ids"]
    return request(prompt, temperature=1.0, seed=seed, n=n, max_tokens=OUTPUTS, ignore_eos=True)


def check_margins(index: int, seed: int, answer: Answer) -> None:
    """The test stands only on decisions that floating-point noise cannot turn."""
    prompt = golden("greedy")[index]["prompt_token_ids"]
    for sample, state in answer.samples.items():
        assert min(sampled_margins(prompt, state.token_ids, seed, sample)) >= MARGIN


def test_seeded_samples_are_the_same_in_every_company(
    engine: EngineCase, roomy: Service, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = {}
    for index, seed in SEEDED:
        alone[index] = stream(stub_of(roomy), sampled(index, seed))
        check_margins(index, seed, alone[index])
        assert len({tuple(s.token_ids) for s in alone[index].samples.values()}) == 4
    crowd = [request(TEXT, seed=seed, max_tokens=OUTPUTS) for seed in range(29)]
    messages = [sampled(index, seed) for index, seed in SEEDED]
    answers = together(roomy, [*messages, *crowd])
    for (index, _), answer in zip(SEEDED, answers, strict=False):
        assert answer.values() == alone[index].values()
    smaller = TORCH[8] if engine.engine == "torch" else engine
    for mode in MODES:
        options = pressed(mode, smaller, depth=2, tokens=192)
        with serving(smaller, tmp_path_factory.mktemp(mode) / "log", options) as small:
            answers = together(small, messages)
            assert preemptions(small, mode) >= 1
            small.wait_until_idle()
        for (index, _), answer in zip(SEEDED, answers, strict=True):
            assert answer.values() == alone[index].values()


def test_every_kind_in_one_batch(engine: EngineCase, roomy: Service) -> None:
    lines, beams = golden("greedy"), golden("beam")
    system = lines[3]["prompt_token_ids"] * 6
    stub = stub_of(roomy)
    messages = [
        greedy(lines[0]),
        request(lines[1]["prompt_token_ids"], temperature=0.0, max_tokens=20, repetition_penalty=1.2),
        sampled(*SEEDED[0], n=3),
        beam(next(line for line in beams if line["num_beams"] == 4)),
        request([*system, *lines[4]["prompt_token_ids"]], temperature=0.0, max_tokens=20),
    ]
    pinned = stub.RegisterPrefix(
        pb.RegisterPrefixRequest(name="system", token_ids=pb.TokenIds(ids=system)), timeout=60
    )
    assert pinned.pinned_blocks == len(system) // engine.block_size > 1
    alone = [stream(stub, message) for message in messages]
    mixed = together(roomy, messages)
    assert [answer.values() for answer in mixed] == [answer.values() for answer in alone]
    assert mixed[4].counts[1] >= pinned.pinned_tokens
    assert alone[0].samples[0].token_ids == lines[0]["output_token_ids"]
    names = [prefix.name for prefix in stub.ListPrefixes(pb.ListPrefixesRequest()).prefixes]
    assert names == ["system"]
    stub.UnregisterPrefix(pb.UnregisterPrefixRequest(name="system"))
    assert not stub.ListPrefixes(pb.ListPrefixesRequest()).prefixes


# -- prefix reuse -----------------------------------------------------------------------------------


def prefilled(service: Service) -> int:
    return int(service.metrics()['octavo_scheduled_tokens_total{kind="prefill"}'])


@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_a_second_identical_prompt_computes_only_what_is_new(
    engine: EngineCase, roomy: Service, beside: int
) -> None:
    length = 3 * engine.block_size + beside
    prompt = [1000 + length + 7 * index for index in range(length)]
    stub = stub_of(roomy)
    message = request(prompt, temperature=0.0, max_tokens=8)
    first, before = stream(stub, message), prefilled(roomy)
    second = stream(stub, message)
    found = (length - 1) // engine.block_size * engine.block_size  # at least one token is computed
    assert prefilled(roomy) - before == length - found
    assert first.values() == second.values()
    assert second.counts == (length, found, 8)


def test_the_next_turn_of_a_chat_computes_only_what_is_new(engine: EngineCase, roomy: Service) -> None:
    stub = stub_of(roomy)
    first = [pb.ChatMessage(role="user", content="Name three rivers and tell me where they flow.")]
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    answer = collect(
        stub.Generate(pb.GenerateRequest(chat=pb.ChatPrompt(messages=first), sampling=sampling))
    )
    turn = [
        *first,
        pb.ChatMessage(role="assistant", content=answer.samples[0].text),
        pb.ChatMessage(role="user", content="And which is the longest?"),
    ]
    before = prefilled(roomy)
    message = pb.GenerateRequest(chat=pb.ChatPrompt(messages=turn), sampling=sampling)
    second = collect(stub.Generate(message))
    prompt_tokens, cached, _ = second.counts
    assert prefilled(roomy) - before == prompt_tokens - cached
    # What the first turn computed and the second repeats: prompt, and answer but for the last token.
    repeated = answer.counts[0] + answer.counts[2] - 1
    assert cached == repeated // engine.block_size * engine.block_size > answer.counts[0]


# -- penalties --------------------------------------------------------------------------------------


def test_penalties_have_the_scope_of_the_reference_also_after_preemption(tmp_path: Path) -> None:
    """Repetition counts prompt and output, presence and frequency the output only."""
    settings = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    prompts = [line["prompt_token_ids"] for line in golden("greedy")[:5]]
    messages = [request(p, temperature=0.0, max_tokens=24, **settings) for p in prompts]
    options: dict[str, object] = {"block_size": 8, "num_kv_blocks": 14, "preemption": "recompute"}
    with Service(tmp_path / "log", options) as small:
        answers = together(small, messages)
        assert preemptions(small, "recompute") >= 1
    for prompt, answer in zip(prompts, answers, strict=True):
        outputs = answer.samples[0].token_ids
        for position, token in enumerate(outputs):
            scores = penalized(prompt, outputs[:position])
            best = scores.topk(2).values
            assert best[0] - scores[token] < 1e-3 or best[0] - best[1] < 1e-3


def penalized(prompt: list[int], outputs: list[int]) -> torch.Tensor:
    """The next token's logits, edited by the reference's processor and the definition of the others."""
    from transformers import RepetitionPenaltyLogitsProcessor

    history = torch.tensor([prompt + outputs])
    with torch.inference_mode():
        logits = reference_model()(history).logits[:, -1].clone()
    scores = RepetitionPenaltyLogitsProcessor(1.3)(history, logits)[0]
    for token in set(outputs):
        scores[token] -= 0.7 + 0.4 * outputs.count(token)
    return scores


# -- aborts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [60, pytest.param(500, marks=pytest.mark.full)])
def test_aborts_of_samples_leave_nothing(roomy: Service, times: int) -> None:
    stub = stub_of(roomy)
    for number in range(times):
        call = stub.Generate(request(TEXT, n=2, seed=number, max_tokens=200, ignore_eos=True))
        for _ in range(3):
            next(call)
        call.cancel()
    roomy.wait_until_idle()
    wait_for(lambda: roomy.worker_metrics()["octavo_worker_live_slots"] == 0, "no slot is held", 10)
    assert roomy.metrics()["octavo_cancel_to_free_plans_max"] <= 2


def test_samples_that_end_at_different_lengths(roomy: Service) -> None:
    """Four samples, each ended by its own stop token: all complete, streamed and whole."""
    free = whole(stub_of(roomy), sampled(*SEEDED[0]))
    stops = {free.samples[i].token_ids[at] for i, at in enumerate((0, 4, 8, 12))}
    message = sampled(*SEEDED[0])
    message.sampling.stop_token_ids.extend(stops)
    streamed, unary = stream(stub_of(roomy), message), whole(stub_of(roomy), message)
    assert streamed.values() == unary.values()
    for sample, state in streamed.samples.items():
        tokens = free.samples[sample].token_ids
        end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens) - 1)
        assert state.token_ids == tokens[: end + 1]
    lengths = [len(state.token_ids) for state in streamed.samples.values()]
    assert streamed.counts[2] == sum(lengths) and len(np.unique(lengths)) > 1
