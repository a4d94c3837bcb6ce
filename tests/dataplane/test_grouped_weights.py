"""Weights kept in small integers: exactly what the file has, or near what was rounded."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from forwards import batch_of_rows
from gguf.quants import quantize
from tiny_gguf import write_gguf
from tiny_llama import VOCAB, prompt_of, tiny_llama
from transformers import LlamaForCausalLM

from octavo.common.modelfiles import open_model
from octavo.dataplane.engines.openvino.engine import OpenVinoEngine
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.dataplane.loading.gguf import has_4_bit_weights
from octavo.dataplane.loading.gguf_blocks import KEPT
from octavo.dataplane.loading.grouped import (
    GROUP,
    GroupedMatrix,
    join,
    pack_nibbles,
    round_to_int8,
    unpack_nibbles,
)
from octavo.dataplane.loading.weights import open_weights

KINDS = gguf.GGMLQuantizationType
ROWS, GROUPS = 6, 3


def stored_blocks(kind: KINDS) -> np.ndarray:
    """Quantised values as a file has them: ``[rows, groups, bytes of a block]``."""
    values = np.random.default_rng(3).standard_normal((ROWS, GROUPS * GROUP)).astype(np.float32)
    return quantize(values, kind).reshape(ROWS, GROUPS, -1)


def test_two_values_share_a_byte() -> None:
    values = np.random.default_rng(0).integers(0, 16, (5, 2, GROUP), dtype=np.uint8)
    packed = pack_nibbles(values)
    assert packed.shape == (5, 2, GROUP // 2)
    assert packed[3, 1, 7] == values[3, 1, 14] + 16 * values[3, 1, 15]
    np.testing.assert_array_equal(unpack_nibbles(packed), values)


def test_rounding_is_within_half_a_step() -> None:
    values = np.random.default_rng(1).standard_normal((7, 4 * GROUP)).astype(np.float32)
    values[3, :GROUP] = 0.0
    matrix = round_to_int8(values)
    steps = np.abs(values.reshape(7, 4, GROUP)).max(-1) / 127
    error = np.abs(matrix.values() - values).reshape(7, 4, GROUP).max(-1)
    assert (error <= steps * 0.5001).all()
    assert np.abs(matrix.integers.astype(int)).max() == 127


def test_only_matrices_of_one_kind_are_joined() -> None:
    parts = [KEPT[kind](stored_blocks(kind)) for kind in (KINDS.Q4_0, KINDS.Q4_1)]
    joined = join(parts)
    assert joined is not None
    wanted = np.concatenate([part.values() for part in parts])
    np.testing.assert_array_equal(joined.values(), wanted)
    assert join([parts[0], KEPT[KINDS.Q8_0](stored_blocks(KINDS.Q8_0))]) is None


# -- a model ------------------------------------------------------------------------------------------

WIDE = {"hidden_size": 64, "intermediate_size": 96}
WIDER = {"hidden_size": 256, "intermediate_size": 512}  # rows are whole blocks of k-quants


@pytest.fixture(scope="module")
def wide_model() -> LlamaForCausalLM:
    """Its rows are whole groups."""
    return tiny_llama(**WIDE)


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [
        (WIDE, {"": KINDS.Q4_1}),
        (WIDE, {"": KINDS.Q4_0, "attn_v": KINDS.Q4_1, "token_embd": KINDS.Q8_0}),
        (WIDE, {"": KINDS.Q4_1, "attn_k": KINDS.Q8_0, "ffn_up": KINDS.F16, "output": KINDS.Q5_0}),
        (WIDER, {"": KINDS.Q4_K, "attn_v": KINDS.Q6_K, "ffn_down": KINDS.Q5_1, "output": KINDS.Q5_K}),
    ],
    ids=["q4_1", "q4_0", "mixed", "k-quants"],
)
def test_a_file_of_4_bits_gives_the_logits_of_its_dequantised_values(
    tmp_path: Path, sizes: dict[str, int], kinds: dict[str, KINDS]
) -> None:
    files = open_model(str(write_gguf(tiny_llama(**sizes), tmp_path / "four.gguf", kinds=kinds)))
    assert has_4_bit_weights(files)
    batch = batch_of_rows([(prompt_of(40), 0, [1, 0])], list(range(40)))
    logits = []
    for engine in (
        OpenVinoEngine(files, "exact4", "float32", threads=1),
        TorchEngine(files, "cpu", "float32"),
    ):
        engine.make_pools(2, 32, 0)
        logits.append(engine.logits(engine.forward(batch)))
    assert torch.allclose(logits[0], logits[1], atol=1e-3, rtol=1e-4)


def test_the_order_of_rows_is_that_of_the_plain_tensors(
    wide_model: LlamaForCausalLM, tmp_path: Path
) -> None:
    files = open_model(str(write_gguf(wide_model, tmp_path / "four.gguf", kinds={"": KINDS.Q4_1})))
    kept = open_weights(files, torch.float32, "exact4")
    plain = open_weights(files, torch.float32)
    for part, rows in (("q", 64), ("k", 32), ("v", 32)):
        name = f"model.layers.1.self_attn.{part}_proj.weight"
        matrix = kept.take_matrix(name, (rows, 64))
        assert isinstance(matrix, GroupedMatrix)
        np.testing.assert_allclose(matrix.values(), plain.take(name, (rows, 64)), atol=1e-6)


def test_rows_that_are_no_whole_groups_stay_as_they_are(
    hf_model: LlamaForCausalLM, model_folder: Path
) -> None:
    weights = open_weights(open_model(str(model_folder)), torch.float32, "int8")
    assert isinstance(weights.take_matrix("lm_head.weight", (VOCAB, 32)), GroupedMatrix)
    name = "model.layers.0.mlp.down_proj.weight"
    kept = weights.take_matrix(name, (32, 48))
    assert isinstance(kept, torch.Tensor)
    assert torch.equal(kept, hf_model.state_dict()[name])
