"""The OpenVINO engine computes what the model means, and what the torch engine computes."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from forwards import SIZE, batch_of_rows
from plan_maker import PlanMaker, distribution
from tiny_llama import VOCAB, hf_greedy, hf_logits, prompt_of, save_tiny_llama, tiny_llama
from transformers import LlamaForCausalLM

from octavo.common.modelfiles import open_model
from octavo.dataplane.engine import EngineError
from octavo.dataplane.engines.openvino.engine import OpenVinoEngine
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.proto.plan import Sampling
from octavo.proto.wire import int32s

RAW = Sampling(temperature=0.0, logprobs=VOCAB)
SAMPLED = Sampling(temperature=1.5, seed=77)
HEADS, HEAD_DIM = 2, 8  # of keys and values in the tiny model


def make(folder: Path, packing: str = "none", kv_dtype: str = "float32") -> OpenVinoEngine:
    return OpenVinoEngine(open_model(str(folder)), packing, kv_dtype, threads=1)


@pytest.fixture(scope="module")
def fast(model_folder: Path) -> OpenVinoEngine:
    return make(model_folder)


# -- against Hugging Face, through the runner -------------------------------------------------------


@pytest.mark.parametrize("length", [1, 31, 32, 33, 70])
def test_distributions_equal_hugging_face(
    fast: OpenVinoEngine, hf_model: LlamaForCausalLM, length: int
) -> None:
    maker, prompt = PlanMaker(fast, SIZE), prompt_of(length)
    result = maker.prefill(maker.admit(0, prompt, length + 4, RAW))
    tokens = list(prompt)
    for _ in range(4):
        wanted = torch.log_softmax(hf_logits(hf_model, tokens)[-1], dim=-1)
        assert torch.allclose(distribution(result, 0), wanted, atol=2e-5)
        tokens.append(int(result.tokens[0]))
        result = maker.run(decode_slots=[0])


def test_chunks_and_decodes_in_one_plan_do_not_affect_one_another(
    fast: OpenVinoEngine, hf_model: LlamaForCausalLM
) -> None:
    maker = PlanMaker(fast, SIZE)
    prompts = prompt_of(40), prompt_of(33, 1), prompt_of(75, 2)
    found = [[int(maker.prefill(maker.admit(0, prompts[0], 60)).tokens[0])], [], []]
    result = maker.run(
        admits=[maker.admit(1, prompts[1], 60), maker.admit(2, prompts[2], 90)],
        decode_slots=[0],
        chunk_slots=[2, 1],
        chunk_lengths=[13, 33],
        draw_slots=[1],
        draw_chunks=[1],
    )
    found[0].append(int(result.tokens[0]))
    found[1].append(int(result.tokens[1]))
    parts = {"decode_slots": [1, 0], "chunk_slots": [2], "draw_slots": [2], "draw_chunks": [0]}
    result = maker.run(chunk_lengths=[62], **parts)
    for slot, token in zip((1, 0, 2), result.tokens.tolist(), strict=True):
        found[slot].append(token)
    for slot, tokens in enumerate(maker.decode([0, 1, 2], 5)):
        found[slot] += tokens
    assert found == [hf_greedy(hf_model, p, len(f)) for p, f in zip(prompts, found, strict=True)]


def test_a_row_reads_a_prefix_that_a_later_row_of_the_plan_stores(
    fast: OpenVinoEngine, hf_model: LlamaForCausalLM
) -> None:
    maker, shared = PlanMaker(fast, SIZE), prompt_of(64)
    prompts = [shared + prompt_of(9, 1), shared + prompt_of(5, 2)]
    first = maker.admit(0, prompts[0], 90)
    blocks = [*first.blocks[:2].tolist(), *maker.blocks(20)]
    second = maker.admit(1, prompts[1], 0, blocks=blocks, computed=len(shared))
    result = maker.run(
        admits=[second, first],
        chunk_slots=[1, 0],  # the reader's row comes before the writer's
        chunk_lengths=[5, 73],
        draw_slots=[0, 1],
        draw_chunks=[1, 0],
    )
    found = [[token] for token in result.tokens.tolist()]
    for slot, tokens in enumerate(maker.decode([0, 1], 4)):
        found[slot] += tokens
    assert found == [hf_greedy(hf_model, prompt, 5) for prompt in prompts]


def test_forks_with_copied_blocks_equal_samples_that_ran_alone(fast: OpenVinoEngine) -> None:
    prompt = prompt_of(40)
    maker = PlanMaker(fast, SIZE)
    wanted = []
    for sample in range(2):
        alone = maker.admit(sample, prompt, 60, SAMPLED, sample=sample)
        first = maker.prefill(alone).tokens.tolist()
        wanted.append(first + maker.decode([sample], 4)[0])
    maker = PlanMaker(fast, SIZE, seed=6)
    parent = maker.admit(4, prompt, 60, SAMPLED)
    result = maker.run(
        admits=[parent],
        forks=[4, 1, 1],
        chunk_slots=[4],
        chunk_lengths=[40],
        draw_slots=[4, 1],
        draw_chunks=[0, 0],
    )
    copy = maker.blocks(1)[0]
    found = [[token] for token in result.tokens.tolist()]
    changes = {"table_slots": [1], "table_indices": [1], "table_blocks": [copy]}
    result = maker.run(copies=[parent.blocks[1], copy], decode_slots=[4, 1], **changes)
    for tokens, token, more in zip(found, result.tokens, maker.decode([4, 1], 3), strict=True):
        tokens += [int(token), *more]
    assert found == wanted


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "uint8"])
def test_swapped_out_and_in_again_elsewhere_goes_on_unchanged(
    model_folder: Path, kv_dtype: str
) -> None:
    engine, prompt = make(model_folder, kv_dtype=kv_dtype), prompt_of(50)
    maker = PlanMaker(engine, SIZE)
    wanted = maker.prefill(maker.admit(1, prompt, 64, SAMPLED)).tokens.tolist()
    wanted += maker.decode([1], 7)[0]
    maker = PlanMaker(engine, SIZE)
    admit = maker.admit(0, prompt, 64, SAMPLED)
    tokens = maker.prefill(admit).tokens.tolist() + maker.decode([0], 2)[0]
    maker.run(swap_out=[admit.blocks[0], 9, admit.blocks[1], 3], free_slots=[0])
    maker.prefill(maker.admit(5, prompt_of(64, 9), 0, blocks=admit.blocks.tolist()))
    back = maker.blocks(64)
    again = maker.admit(2, prompt + tokens, 0, SAMPLED, blocks=back, prompt_len=50, computed=52)
    result = maker.run(swap_in=[9, back[0], 3, back[1]], admits=[again], decode_slots=[2])
    tokens += result.tokens.tolist() + maker.decode([2], 4)[0]
    assert tokens == wanted


# -- against the torch engine, one forward at a time --------------------------------------------------


@pytest.fixture(scope="module")
def torch_engine(model_folder: Path) -> TorchEngine:
    """Apart from the session's: here it has pools that tests look into."""
    return TorchEngine(open_model(str(model_folder)), "cpu", "float32")


def test_nothing_but_the_new_places_is_written(fast: OpenVinoEngine, torch_engine: TorchEngine) -> None:
    """Pools full of NaN: what is not written stays, and what is never written is never read."""
    fast.make_pools(9, SIZE, 0)
    torch_engine.make_pools(9, SIZE, 0)
    for pool in (fast._pools.keys, fast._pools.values):
        pool.fill(np.nan)
    for tensor in torch_engine._pools.all():
        tensor.fill_(float("nan"))
    first, second, third = prompt_of(35), prompt_of(70, 1), prompt_of(64, 2)
    tables = [7, 2], [0, 5, 3], [8, 1]
    batches = [
        batch_of_rows([(first, 0, tables[0]), (second[:13], 0, tables[1])], [34, 47]),
        batch_of_rows(
            [(second, 13, tables[1]), ([*first, 9], 35, tables[0]), (third, 0, tables[2])],
            [3, 56, 57, 58, 121],
        ),
    ]
    for batch in batches:
        logits = [e.logits(e.forward(batch)) for e in (fast, torch_engine)]
        assert torch.allclose(logits[0], logits[1], atol=1e-4)
    keys, values = (torch.stack(p).numpy() for p in vars(torch_engine._pools).values())
    # The rest of a row's last block of values is cleared: no sequence shares a block that is not full.
    values[:, [2, 3]] = np.nan_to_num(values[:, [2, 3]])
    for mine, wanted in ((fast._pools.keys, keys), (fast._pools.values, values)):
        np.testing.assert_allclose(mine, wanted, atol=1e-5, equal_nan=True)
    assert np.isnan(fast._pools.keys[:, [4, 6]]).all()


def test_results_stay_when_the_next_forward_comes(fast: OpenVinoEngine) -> None:
    fast.make_pools(4, SIZE, 0)
    batch = batch_of_rows([(prompt_of(20), 0, [2])], [3, 19])
    hidden = fast.forward(batch)
    logits = fast.logits(hidden)
    before = hidden.clone(), logits.clone()
    other = fast.forward(batch_of_rows([(prompt_of(30, 1), 0, [1])], [5, 29]))
    assert not torch.equal(fast.logits(other), logits)
    assert torch.equal(hidden, before[0])
    assert torch.equal(logits, before[1])


def test_no_row_may_want_logits(fast: OpenVinoEngine) -> None:
    fast.make_pools(4, SIZE, 0)
    hidden = fast.forward(batch_of_rows([(prompt_of(20), 0, [2])], []))
    assert hidden.shape == (0, 32)
    assert fast.logits(hidden).shape == (0, VOCAB)


def test_copies_read_every_source_before_they_write(fast: OpenVinoEngine) -> None:
    fast.make_pools(5, SIZE, 3)
    pools = fast._pools
    for pool in (pools.keys, pools.values):
        pool[:] = np.random.default_rng(0).standard_normal(pool.shape)
    keys, values = pools.keys.copy(), pools.values.copy()
    fast.copy_blocks(int32s([0, 1, 1, 4]))
    for after, before in ((pools.keys, keys), (pools.values, values)):
        np.testing.assert_array_equal(after, before[:, [0, 0, 2, 3, 1]])
    fast.swap_out(int32s([4, 0, 2, 2]))
    fast.swap_in(int32s([2, 0, 0, 3]))
    for after, before in ((pools.keys, keys), (pools.values, values)):
        np.testing.assert_array_equal(after, before[:, [2, 0, 2, 1, 1]])


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        {"head_dim": 80, "num_attention_heads": 8, "num_key_value_heads": 2, "rope_theta": 5e5},
        {"num_attention_heads": 8, "num_key_value_heads": 8, "rms_norm_eps": 0.1},
    ],
    ids=["biases", "head_dim", "no_groups"],
)
def test_variants_of_the_family_equal_the_torch_engine(
    changes: dict[str, object], tmp_path: Path
) -> None:
    model = tiny_llama(**changes)
    with torch.no_grad():  # biases start at zero, which would prove nothing
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    folder = save_tiny_llama(model, tmp_path)
    batch = batch_of_rows([(prompt_of(45), 0, [2, 0])], list(range(45)))
    engines = make(folder), TorchEngine(open_model(str(folder)), "cpu", "float32")
    logits = []
    for engine in engines:
        engine.make_pools(4, SIZE, 0)
        logits.append(engine.logits(engine.forward(batch)))
    assert torch.allclose(logits[0], logits[1], atol=2e-4)


# -- rounded weights and caches -----------------------------------------------------------------------


def error_of(engine: OpenVinoEngine, exact: torch.Tensor) -> float:
    """Relative error of the logits of a prompt computed in two chunks."""
    engine.make_pools(8, SIZE, 0)
    prompt = prompt_of(60)
    engine.forward(batch_of_rows([(prompt[:41], 0, [6, 1])], []))
    batch = batch_of_rows([(prompt, 41, [6, 1])], list(range(19)))
    return float((engine.logits(engine.forward(batch)) - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("packing", "kv_dtype", "low", "high"),
    [
        ("none", "float32", 0.0, 1e-5),
        ("none", "float16", 1e-5, 2e-3),
        ("none", "uint8", 1e-4, 3e-2),
        ("int8", "float32", 1e-3, 1e-1),
    ],
)
def test_rounding_changes_a_little(
    model_folder: Path,
    hf_model: LlamaForCausalLM,
    packing: str,
    kv_dtype: str,
    low: float,
    high: float,
) -> None:
    exact = hf_logits(hf_model, prompt_of(60))[41:]
    assert low <= error_of(make(model_folder, packing, kv_dtype), exact) < high


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_per_token"),
    [
        ("float32", 2 * 2 * HEADS * HEAD_DIM * 4),
        ("float16", 2 * 2 * HEADS * HEAD_DIM * 2),
        # Each channel of a block's keys and each token's values bring 8 bytes of scale.
        ("uint8", 2 * HEADS * (HEAD_DIM + 8 * HEAD_DIM // SIZE + HEAD_DIM + 8)),
    ],
)
def test_what_it_says_of_itself(model_folder: Path, kv_dtype: str, bytes_per_token: int) -> None:
    engine = make(model_folder, kv_dtype=kv_dtype)
    info = engine.describe()
    assert (info.device, info.engine, info.block_sizes) == ("cpu", "openvino", (SIZE,))
    assert info.token_bytes == bytes_per_token
    engine.make_pools(3, SIZE, 0)
    pools = engine._pools
    assert pools.keys.nbytes + pools.values.nbytes == 3 * SIZE * bytes_per_token


# -- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "message"),
    [((4, 16, 0), "--block-size 16 .* only 32"), ((1 << 40, 32, 0), "lower --num-kv-blocks")],
)
def test_pools_that_cannot_be_are_refused(
    fast: OpenVinoEngine, shape: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        fast.make_pools(*shape)
    fast.make_pools(4, SIZE, 2)
    assert fast.forward(batch_of_rows([(prompt_of(5), 0, [3])], [4])).shape == (1, 32)


@pytest.fixture(scope="module", autouse=True)
def quiet_afterwards(fast: OpenVinoEngine) -> Iterator[None]:
    """The pools of the shared engine go when the module is done."""
    yield
    fast.make_pools(1, SIZE, 0)


# -- activations in int8 ----------------------------------------------------------------------------


def test_rounded_activations_stay_close_and_know_no_neighbours(model_folder: Path) -> None:
    files = open_model(str(model_folder))
    plain = OpenVinoEngine(files, "int8", "float32", threads=1)
    rounded = OpenVinoEngine(files, "int8", "float32", threads=1, round_activations=True)
    found = {}
    for name, engine in (("plain", plain), ("rounded", rounded)):
        maker = PlanMaker(engine, SIZE)
        alone = maker.prefill(maker.admit(0, prompt_of(40), 60, RAW))
        company = [maker.admit(slot, prompt_of(30 + slot, slot), 60, RAW) for slot in (1, 2)]
        together = maker.prefill(maker.admit(3, prompt_of(40), 60, RAW), *company)
        found[name] = [distribution(alone, 0).numpy(), distribution(together, 0).numpy()]
    assert np.allclose(*found["rounded"], atol=1e-4)
    gap = np.abs(found["rounded"][0] - found["plain"][0]).max()
    assert 1e-6 < gap < 0.2
