"""Every family gives the same logits from the shards of several ranks as from the whole."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from forwards import SIZE, batch_of_rows
from safetensors.torch import load_file, save_file
from test_model_families import GPT2, OPT, hf_model_of
from thread_gang import ThreadGang
from tiny_gguf import Q8_0, write_gguf
from tiny_llama import prompt_of, save_tiny_llama, tiny_llama

from octavo.common.modelfiles import ModelError, ModelFiles, open_model
from octavo.dataplane.engine import Engine
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.dataplane.loading import gguf as gguf_loading
from octavo.dataplane.loading.weights import Part, open_weights
from octavo.dataplane.models.shard import Shard

Q4_1 = gguf.GGMLQuantizationType.Q4_1
# Vocabularies of 300 and 301 tokens, heads of 8 and others; KV heads divided, or had by several ranks.
BY_3 = {"num_key_value_heads": 3, "intermediate_size": 54}
BY_4 = {"num_attention_heads": 8}
WINDOW = {"sliding_window": 19}
PARTIAL = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama-2": ("Llama", 2, {"attention_bias": True, "mlp_bias": True, "vocab_size": 301}),
    "llama-3": ("Llama", 3, BY_3 | {"tie_word_embeddings": True}),
    "llama-4": ("Llama", 4, BY_4 | {"vocab_size": 301}),
    "llama-7": ("Llama", 7, {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1}),
    "mistral-2": ("Mistral", 2, WINDOW),
    "qwen2-2": ("Qwen2", 2, {"tie_word_embeddings": True}),
    "qwen2-4": ("Qwen2", 4, BY_4),
    "qwen3-2": ("Qwen3", 2, {"head_dim": 80, "attention_bias": True}),
    "qwen3-3": ("Qwen3", 3, BY_3 | {"head_dim": 22}),
    "gemma3-2": ("Gemma3Text", 2, WINDOW | {"head_dim": 24, "final_logit_softcapping": 2.5}),
    "gemma3-4": ("Gemma3Text", 4, BY_4 | WINDOW | {"head_dim": 24, "tie_word_embeddings": True}),
    "phi3-2": ("Phi3", 2, PARTIAL | {"vocab_size": 301}),
    "phi3-3": ("Phi3", 3, BY_3 | {"tie_word_embeddings": True}),
    "phi3-4": ("Phi3", 4, BY_4 | PARTIAL | {"hidden_size": 64}),
    "opt-2": ("OPT", 2, OPT | {"vocab_size": 301}),
    "opt-3": ("OPT", 3, OPT | {"ffn_dim": 57}),
    "gpt2-3": ("GPT2", 3, GPT2 | {"n_head": 3, "n_embd": 48, "vocab_size": 301}),
    "gpt2-4": ("GPT2", 4, GPT2 | {"n_head": 4, "n_embd": 48, "n_inner": 56}),
}
ROWS = [(prompt_of(70), 0, [2, 0, 1]), (prompt_of(33, 1), 0, [5, 3])]


def logits_of(engine: Engine) -> torch.Tensor:
    """Of two prompts, each in a chunk and a decode, in permuted blocks."""
    engine.make_pools(6, SIZE, 0)
    chunks = [(tokens[:-1], 0, table) for tokens, _, table in ROWS]
    decodes = [(tokens, len(tokens) - 1, table) for tokens, _, table in ROWS]
    found = []
    for rows, wanted in ((chunks, list(range(101))), (decodes, [0, 1])):
        found.append(engine.logits(engine.forward(batch_of_rows(rows, wanted))))
    return torch.cat(found)


def check_shards(files: ModelFiles, size: int) -> ThreadGang:
    """Every rank has the logits of the whole model, to the last bit the same."""
    gang = ThreadGang(files, size)
    found = gang.run(logits_of)
    whole = logits_of(TorchEngine(files, "cpu", "float32"))
    assert whole.std() > 0.3, "logits this small would agree with anything"
    assert float((found[0] - whole).abs().max()) < 1e-4
    assert all(torch.equal(found[0], other) for other in found[1:])
    return gang


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_whole(name: str, tmp_path: Path) -> None:
    prefix, size, changes = CASES[name]
    hf_model_of(prefix, changes).save_pretrained(tmp_path)
    check_shards(open_model(str(tmp_path)), size)


# -- GGUF: rows of quantised values, columns inside and across their groups ---------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModelFiles]:
    """A Llama of 64 x 192 as a GGUF file of one kind of values."""
    folder = tmp_path_factory.mktemp("gguf")

    def make(kind: gguf.GGMLQuantizationType) -> ModelFiles:
        path = folder / f"{kind.name}.gguf"
        if not path.exists():
            write_gguf(tiny_llama(hidden_size=64, intermediate_size=192), path, {"": kind})
        return open_model(str(path))

    return make


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", [Q8_0, Q4_1], ids=["Q8_0", "Q4_1"])
def test_gguf_shards(small: Callable[..., ModelFiles], kind: Any, size: int) -> None:
    check_shards(small(kind), size)


@pytest.mark.parametrize("packing", ["none", "exact4", "int8"])
@pytest.mark.parametrize(
    "part",
    [
        Part(rows=(range(16, 32),)),
        Part(rows=(range(16), range(48, 64))),
        Part(columns=(range(32, 64),)),
        Part(rows=(range(16, 48),), columns=(range(32),)),
        Part(columns=(range(16), range(40, 64))),
    ],
    ids=["rows", "ranges", "group", "both", "across groups"],
)
def test_a_part_is_that_part_of_the_whole(
    small: Callable[..., ModelFiles], part: Part, packing: str
) -> None:
    weights = open_weights(small(Q4_1), torch.float32, packing)
    for name in ("self_attn.q_proj", "self_attn.o_proj"):
        full = f"model.layers.1.{name}.weight"
        whole = plain(weights.take_matrix(full, (64, 64)))
        wanted = whole
        if part.rows is not None:
            wanted = torch.cat([wanted[r.start : r.stop] for r in part.rows])
        if part.columns is not None:
            wanted = torch.cat([wanted[:, c.start : c.stop] for c in part.columns], dim=1)
        found = plain(weights.take_matrix(full, (64, 64), part))
        # Columns may be in other groups, which int8 rounds otherwise.
        tolerance = 0.02 if packing == "int8" and part.columns is not None else 1e-6
        assert found.shape == wanted.shape
        assert float((found - wanted).abs().max()) < tolerance


def plain(matrix: Any) -> torch.Tensor:
    return matrix if isinstance(matrix, torch.Tensor) else torch.from_numpy(matrix.values())


# -- what a rank reads and holds ----------------------------------------------------------------------


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_bytes_fall_with_the_number_of_ranks(
    small: Callable[..., ModelFiles], form: str, tmp_path: Path
) -> None:
    files = small(Q8_0)
    if form == "safetensors":
        model = tiny_llama(hidden_size=64, intermediate_size=192)
        files = open_model(str(save_tiny_llama(model, tmp_path)))
    whole = TorchEngine(files, "cpu", "float32").describe()
    norms = 5 * 64 * 4  # every rank has them
    for size in (2, 4):
        infos = [engine.describe() for engine in ThreadGang(files, size).engines]
        # K and V of two layers, whose two heads are there twice with four ranks.
        doubled = 2 * 2 * 32 * 64 * 4 if size == 4 else 0
        total = whole.weight_bytes + (size - 1) * norms + doubled
        assert sum(info.weight_bytes for info in infos) == total
        assert max(i.weight_bytes for i in infos) < whole.weight_bytes / size * 1.1
        assert {i.token_bytes for i in infos} == {whole.token_bytes // 2}  # there are two KV heads


def test_a_rank_reads_only_its_part(
    small: Callable[..., ModelFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    real = gguf_loading.dequantize

    def counting(raw: Any, kind: Any) -> Any:
        counted.append(raw.nbytes)
        return real(raw, kind)

    monkeypatch.setattr(gguf_loading, "dequantize", counting)
    TorchEngine(small(Q8_0), "cpu", "float32")
    whole = sum(counted)
    counted.clear()
    ThreadGang(small(Q8_0), 2)
    assert whole <= sum(counted) < whole * 1.02


# -- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (4, {"num_attention_heads": 6}, "num_attention_heads 6 cannot be divided by 4"),
        (6, {"num_key_value_heads": 2}, "num_attention_heads 4 cannot be divided by 6"),
        (3, {"num_attention_heads": 6, "num_key_value_heads": 2}, "num_key_value_heads 2 cannot"),
        (4, {"intermediate_size": 50}, "intermediate_size 50 cannot be divided by 4"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_before_weights_are_read(
    size: int, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_tiny_llama(tiny_llama(hidden_size=48, **changes), tmp_path)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="not a readable safetensors"):
        TorchEngine(open_model(str(folder)), "cpu", "float32")
    save_file({}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"--tensor-parallel {size}: {message}"):
        ThreadGang(open_model(str(folder)), size)


def test_a_tensor_of_another_shape_is_refused_by_every_rank(tmp_path: Path) -> None:
    folder = save_tiny_llama(tiny_llama(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name][:, :40].contiguous()
    save_file(tensors, folder / "model.safetensors")
    shapes = re.escape("has the shape [32, 40], the configuration wants [32, 48]")
    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor {re.escape(name)} {shapes}"):
        ThreadGang(open_model(str(folder)), 2)


def test_a_cut_file_is_refused_by_name(small: Callable[..., ModelFiles], tmp_path: Path) -> None:
    whole = small(Q8_0).path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(ModelError, match=r"cut\.gguf: tensor \S+ ends at byte \d+ of"):
        ThreadGang(open_model(str(cut)), 2)
    folder = save_tiny_llama(tiny_llama(), tmp_path / "folder")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
        ThreadGang(open_model(str(folder)), 2)


def test_parts_cover_everything_once() -> None:
    for total in (1, 5, 300, 50257):
        for size in (1, 2, 3, 7):
            shares = Shard(0, size).shares(total)
            assert np.concatenate([np.array(share) for share in shares]).tolist() == list(range(total))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
