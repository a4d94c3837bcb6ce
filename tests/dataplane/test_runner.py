import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from plan_maker import GREEDY, PlanMaker, distribution
from tiny_llama import hf_greedy, hf_logits, prompt_of
from transformers import LlamaForCausalLM

from octavo.common.modelfiles import open_model
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.dataplane.slots import PlanError
from octavo.kernels.table import REFERENCE
from octavo.proto.plan import Sampling
from octavo.proto.wire import ProtocolError, int32s

CPU_BLOCKS = (9, 3, 0, 5)
RAW = Sampling(temperature=0.0, logprobs=300)  # the whole distribution comes back


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 33])
def test_distributions_and_greedy_tokens_equal_hugging_face(
    engine: TorchEngine, hf_model: LlamaForCausalLM, block_size: int, length: int
) -> None:
    maker, prompt = PlanMaker(engine, block_size), prompt_of(length)
    result = maker.prefill(maker.admit(0, prompt, length + 8, RAW))
    tokens = list(prompt)
    for _ in range(8):
        wanted = torch.log_softmax(hf_logits(hf_model, tokens)[-1], dim=-1)
        assert torch.allclose(distribution(result, 0), wanted, atol=2e-5)
        assert int(result.tokens[0]) == int(wanted.argmax())
        assert result.draw_logprobs is not None
        assert float(result.draw_logprobs.logprobs[0]) == pytest.approx(float(wanted.max()), abs=2e-5)
        tokens.append(int(result.tokens[0]))
        result = maker.run(decode_slots=[0])


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_chunked_prefill_gives_the_same_tokens(
    engine: TorchEngine, hf_model: LlamaForCausalLM, chunk: int
) -> None:
    maker, prompt = PlanMaker(engine), prompt_of(21)
    admits, done = [maker.admit(0, prompt, 40)], 0
    while done < len(prompt):
        size = min(chunk, len(prompt) - done)
        done += size
        draw = {"draw_slots": [0], "draw_chunks": [0]} if done == len(prompt) else {}
        result = maker.run(admits=admits, chunk_slots=[0], chunk_lengths=[size], **draw)
        assert len(result.tokens) == (1 if draw else 0)
        admits = []
    tokens = [int(result.tokens[0]), *maker.decode([0], 7)[0]]
    assert tokens == hf_greedy(hf_model, prompt, 8)


def test_a_mixed_plan_gives_each_row_what_it_gets_alone(
    engine: TorchEngine, hf_model: LlamaForCausalLM
) -> None:
    maker = PlanMaker(engine)
    first, second, third = prompt_of(9), prompt_of(6, 1), prompt_of(13, 2)
    found = {0: [int(maker.prefill(maker.admit(0, first, 30)).tokens[0])], 1: [], 2: []}
    result = maker.run(
        admits=[maker.admit(1, second, 30), maker.admit(2, third, 30)],
        decode_slots=[0],
        chunk_slots=[2, 1],
        chunk_lengths=[5, 6],
        draw_slots=[1],
        draw_chunks=[1],
    )
    found[0].append(int(result.tokens[0]))
    found[1].append(int(result.tokens[1]))
    result = maker.run(
        decode_slots=[1, 0], chunk_slots=[2], chunk_lengths=[8], draw_slots=[2], draw_chunks=[0]
    )
    for slot, token in zip((1, 0, 2), result.tokens.tolist(), strict=True):
        found[slot].append(token)
    for slot, tokens in enumerate(maker.decode([0, 1, 2], 5)):
        found[slot] += tokens
    for slot, prompt in enumerate((first, second, third)):
        assert found[slot] == hf_greedy(hf_model, prompt, len(found[slot]))


def test_table_entries_append_blocks_as_a_sequence_grows(
    engine: TorchEngine, hf_model: LlamaForCausalLM
) -> None:
    maker, prompt = PlanMaker(engine), prompt_of(4)
    tokens = [int(maker.prefill(maker.admit(0, prompt, 4)).tokens[0])]
    for index in (1, 2):
        entry = {"table_slots": [0], "table_indices": [index], "table_blocks": maker.blocks(1)}
        tokens += maker.run(decode_slots=[0], **entry).tokens.tolist()
        tokens += maker.decode([0], 3)[0]
    assert tokens == hf_greedy(hf_model, prompt, 9)


def test_rows_of_one_plan_share_a_prefix_that_it_fills(
    engine: TorchEngine, hf_model: LlamaForCausalLM
) -> None:
    maker, shared = PlanMaker(engine), prompt_of(8)
    prompts = [shared + prompt_of(3, 1), shared + prompt_of(5, 2)]
    first = maker.admit(0, prompts[0], 20)
    own = maker.blocks(12)
    second = maker.admit(
        1, prompts[1], 0, blocks=[*first.blocks[:2].tolist(), *own], computed=len(shared)
    )
    result = maker.run(
        admits=[second, first],
        chunk_slots=[1, 0],  # the reader's row comes before the writer's
        chunk_lengths=[5, 11],
        draw_slots=[0, 1],
        draw_chunks=[1, 0],
    )
    found = [[token] for token in result.tokens.tolist()]
    for slot, tokens in enumerate(maker.decode([0, 1], 4)):
        found[slot] += tokens
    assert found == [hf_greedy(hf_model, prompt, 5) for prompt in prompts]


# -- forks ----------------------------------------------------------------------------------------


def sampled(seed: int = 77) -> Sampling:
    return Sampling(temperature=1.5, seed=seed)


def alone(engine: TorchEngine, prompt: list[int], sample: int, count: int) -> list[int]:
    maker = PlanMaker(engine, num_blocks=32, seed=sample)
    first = maker.prefill(maker.admit(3, prompt, 40, sampled(), sample=sample)).tokens
    return [int(first[0]), *maker.decode([3], count - 1)[0]]


@pytest.mark.parametrize("length", [6, 8])  # in mid-block, and at a block's end
def test_forks_with_copy_on_write_equal_samples_that_ran_alone(
    engine: TorchEngine, length: int
) -> None:
    prompt = prompt_of(length)
    wanted = [alone(engine, prompt, sample, 7) for sample in range(3)]
    maker = PlanMaker(engine)
    parent = maker.admit(4, prompt, length, sampled())
    result = maker.run(
        admits=[parent],
        forks=[4, 1, 1, 1, 2, 2],  # slot 2 is forked from a child of the same plan
        chunk_slots=[4],
        chunk_lengths=[length],
        draw_slots=[4, 1, 2],
        draw_chunks=[0, 0, 0],
    )
    found = [[token] for token in result.tokens.tolist()]
    # Each child gets blocks of its own from here on: a copy of the partly filled one, if any.
    partial = [int(parent.blocks[-1])] if length % 4 else []
    copies, entries = [], []
    for slot in (4, 1, 2):
        index = len(parent.blocks) - len(partial)
        for source in partial if slot != 4 else []:
            copy = maker.blocks(1)[0]
            copies += [source, copy]
            entries.append((slot, index, copy))
        index = len(parent.blocks)
        entries += [(slot, index + offset, block) for offset, block in enumerate(maker.blocks(8))]
    slots, indices, blocks = zip(*entries, strict=True)
    changes = {"table_slots": slots, "table_indices": indices, "table_blocks": blocks}
    result = maker.run(copies=copies, decode_slots=[4, 1, 2], **changes)
    for tokens, token in zip(found, result.tokens.tolist(), strict=True):
        tokens.append(token)
    for tokens, more in zip(found, maker.decode([4, 1, 2], 5), strict=True):
        tokens += more
    assert found == wanted
    assert len({tuple(tokens) for tokens in found}) == 3


def test_swapped_out_and_in_again_elsewhere_goes_on_unchanged(engine: TorchEngine) -> None:
    prompt = prompt_of(10)
    wanted = alone(engine, prompt, 0, 8)
    maker = PlanMaker(engine)
    admit = maker.admit(0, prompt, 16, sampled())
    tokens = maker.prefill(admit).tokens.tolist() + maker.decode([0], 2)[0]
    pairs = np.column_stack((admit.blocks, CPU_BLOCKS)).reshape(-1)
    maker.run(swap_out=pairs, free_slots=[0])
    overwrite = maker.admit(5, prompt_of(16, 9), 0, blocks=admit.blocks.tolist())
    maker.prefill(overwrite)
    back = maker.blocks(24)
    pairs = np.column_stack((CPU_BLOCKS, back[:4])).reshape(-1)
    again = maker.admit(2, prompt + tokens, 0, sampled(), blocks=back, prompt_len=10, computed=12)
    tokens += maker.run(swap_in=pairs, admits=[again], decode_slots=[2]).tokens.tolist()
    tokens += maker.decode([2], 4)[0]
    assert tokens == wanted


def test_recomputed_after_preemption_goes_on_unchanged(engine: TorchEngine) -> None:
    prompt, sampling = (
        prompt_of(7),
        Sampling(
            temperature=1.0,
            seed=5,
            repetition_penalty=1.4,
            presence_penalty=0.7,
            frequency_penalty=0.3,
            min_tokens=5,
            stop_token_ids=int32s(range(100)),
        ),
    )
    maker = PlanMaker(engine)
    wanted = maker.prefill(maker.admit(0, prompt, 40, sampling)).tokens.tolist()
    wanted += maker.decode([0], 9)[0]
    for kept in (1, 3, 9):
        maker.run(free_slots=[0, 1])
        admit = maker.admit(1, prompt + wanted[:kept], 20, sampling, prompt_len=7)
        found = maker.prefill(admit).tokens.tolist()
        found += maker.decode([1], 9 - kept)[0] if kept < 9 else []
        assert wanted[:kept] + found == wanted


# -- log-probabilities of prompts -----------------------------------------------------------------


def test_prompt_logprobs_equal_hugging_face_in_any_chunks(
    engine: TorchEngine, hf_model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.dataplane.runner.SCORE_ROWS", 4)
    prompt = prompt_of(23)
    wanted = torch.log_softmax(hf_logits(hf_model, prompt), dim=-1)
    maker = PlanMaker(engine)
    admits = [maker.admit(0, prompt, 23, Sampling(temperature=0.0, prompt_logprobs=3))]
    position = 1
    for size in (1, 12, 10):
        parts = maker.run(admits=admits, chunk_slots=[0], chunk_lengths=[size]).prompt_logprobs
        admits = []
        assert len(parts) == 1
        assert (parts[0].chunk, parts[0].start, parts[0].top_count) == (0, position, 3)
        for offset, logprob in enumerate(parts[0].logprobs.tolist()):
            row = wanted[position + offset - 1]
            assert logprob == pytest.approx(float(row[prompt[position + offset]]), abs=2e-5)
            best = slice(3 * offset, 3 * offset + 3)
            assert parts[0].top_ids[best].tolist() == row.topk(3).indices.tolist()
            assert parts[0].top_logprobs[best] == pytest.approx(row.topk(3).values.tolist(), abs=2e-5)
        position += len(parts[0].logprobs)
    assert position == len(prompt)


def test_prompt_logprobs_begin_where_asked_and_leave_the_draw_alone(
    engine: TorchEngine, hf_model: LlamaForCausalLM
) -> None:
    prompt = prompt_of(12)
    maker = PlanMaker(engine)
    sampling = Sampling(temperature=0.0, prompt_logprobs=0)
    other = maker.admit(1, prompt_of(5, 1), 8)
    result = maker.prefill(other, maker.admit(0, prompt, 20, sampling, prompt_logprobs_from=9))
    assert [(p.chunk, p.start, len(p.logprobs)) for p in result.prompt_logprobs] == [(1, 9, 3)]
    assert len(result.prompt_logprobs[0].top_ids) == 0
    assert int(result.tokens[1]) == hf_greedy(hf_model, prompt, 1)[0]


# -- results and refusals ---------------------------------------------------------------------------


def test_a_result_names_its_plan_and_carries_a_digest(engine: TorchEngine) -> None:
    maker = PlanMaker(engine)
    result = maker.prefill(maker.admit(0, prompt_of(5), 12))
    assert (result.epoch, result.number, result.rank) == (1, 0, 0)
    assert result.digest == zlib.crc32(result.tokens.astype("<i4").tobytes())
    assert result.draw_logprobs is None
    assert result.timings.forward > 0
    assert maker.run(decode_slots=[0]).number == 1


def test_log_probabilities_come_for_those_draws_that_asked(engine: TorchEngine) -> None:
    maker = PlanMaker(engine)
    asks = [
        GREEDY,
        Sampling(temperature=0.0, logprobs=0),
        GREEDY,
        Sampling(temperature=0.0, logprobs=4),
    ]
    admits = [maker.admit(s, prompt_of(5, s), 12, ask) for s, ask in enumerate(asks)]
    found = maker.prefill(*admits).draw_logprobs
    assert found is not None
    assert found.draws.tolist() == [1, 3]
    assert found.top_counts.tolist() == [0, 4]
    assert len(found.top_ids) == len(found.top_logprobs) == 4
    assert float(found.logprobs[1]) == float(found.top_logprobs[0])


def test_an_empty_plan_is_answered(engine: TorchEngine) -> None:
    result = PlanMaker(engine).run()
    assert len(result.tokens) == 0
    assert result.digest == zlib.crc32(b"")


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ({"decode_slots": [1]}, "holds no sequence"),
        ({"decode_slots": [0, 0]}, "occurs twice"),
        ({"chunk_slots": [0], "chunk_lengths": [2]}, "beyond its tokens"),
        ({"chunk_slots": [0], "chunk_lengths": [0]}, "beyond its tokens"),
        ({"chunk_slots": [0], "chunk_lengths": [-5]}, "beyond its tokens"),
        ({"forks": [1, 2, 0]}, "no such parent"),
        ({"table_slots": [0], "table_indices": [9], "table_blocks": [1]}, "next to its table"),
        ({"table_slots": [0], "table_indices": [-1], "table_blocks": [1]}, "next to its table"),
        (
            {"chunk_slots": [0], "chunk_lengths": [1], "draw_slots": [3], "draw_chunks": [0]},
            "ends before",
        ),
    ],
)
def test_plans_that_do_not_fit_the_slots_are_refused(
    engine: TorchEngine, parts: dict[str, list[int]], fault: str
) -> None:
    maker = PlanMaker(engine)
    maker.prefill(maker.admit(0, prompt_of(5), 8))
    with pytest.raises(PlanError, match=fault):
        maker.run(**parts)


def test_a_block_table_too_short_for_the_row_is_refused(engine: TorchEngine) -> None:
    maker = PlanMaker(engine)
    maker.prefill(maker.admit(0, prompt_of(7), 8))
    maker.decode([0], 1)
    with pytest.raises(PlanError, match="too short a block table"):
        maker.run(decode_slots=[0])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"tokens": int32s()}, "0 tokens"),
        ({"tokens": int32s([5, 300])}, "tokens: an id"),
        ({"tokens": int32s([5, -1])}, "tokens: an id"),
        ({"computed": 2}, "computed"),
        ({"computed": -1}, "computed"),
        ({"prompt_len": 3}, "prompt_len"),
        ({"sample": -1}, "sample"),
        ({"blocks": int32s([1] * 65)}, "64 blocks"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p"),
        ({"sampling": Sampling(top_k=-2)}, "top_k"),
        ({"sampling": Sampling(seed=-1)}, "seed"),
        ({"sampling": Sampling(repetition_penalty=float("nan"))}, "repetition_penalty"),
        ({"sampling": Sampling(stop_token_ids=int32s([300]))}, "stop_token_ids"),
        ({"sampling": Sampling(bias_ids=int32s([3]))}, "bias_ids"),
    ],
)
def test_admissions_that_cannot_be_right_are_refused(
    engine: TorchEngine, changes: dict[str, object], fault: str
) -> None:
    maker = PlanMaker(engine)
    admit = maker.admit(0, [5, 6], 4)
    for name, value in changes.items():
        setattr(admit, name, value)
    with pytest.raises((PlanError, ProtocolError), match=fault):
        maker.run(admits=[admit])


def test_a_pool_full_of_nan_does_no_harm(engine: TorchEngine, hf_model: LlamaForCausalLM) -> None:
    maker, prompt = PlanMaker(engine), prompt_of(9)
    for pool in engine._pools.all():
        pool.fill_(float("nan"))
    tokens = [int(maker.prefill(maker.admit(0, prompt, 20)).tokens[0])]
    maker.prefill(maker.admit(1, prompt_of(17, 1), 24))
    tokens += [int(maker.run(decode_slots=[1, 0]).tokens[1]) for _ in range(4)]
    assert tokens == hf_greedy(hf_model, prompt, 5)


def test_an_fp8_cache_halves_blocks_and_stays_close(model_folder: Path, engine: TorchEngine) -> None:
    small = TorchEngine(open_model(str(model_folder)), "cpu", "float32", REFERENCE, kv_fp8=True)
    assert small.describe().token_bytes * 4 == engine.describe().token_bytes
    found = []
    for each in (engine, small):
        maker = PlanMaker(each)
        steps = [maker.prefill(maker.admit(0, prompt_of(30), 60, RAW))]
        steps += [maker.run(swap_out=maker_pairs(maker), swap_in=[], decode_slots=[0])]
        found.append(torch.stack([distribution(step, 0) for step in steps]))
    error = (found[1] - found[0]).norm() / found[0].norm()
    assert 0 < error < 0.05


def maker_pairs(maker: PlanMaker) -> list[int]:
    """A copy of a slot's first block to the swap pool: fp8 pools can be swapped."""
    return [int(maker.slots.blocks[0, 0]), 3]
