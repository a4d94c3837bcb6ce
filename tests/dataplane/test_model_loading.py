"""Weights from files: formats, shards, names and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from plan_maker import PlanMaker
from safetensors.torch import load_file, save_file
from tiny_gguf import Q8_0, write_gguf
from tiny_llama import VOCAB, hf_greedy, prompt_of, save_tiny_llama, tiny_llama
from transformers import LlamaForCausalLM

from octavo.common.modelfiles import ModelError, open_model
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.dataplane.loading.weights import open_weights

PROMPT, COUNT = prompt_of(11), 6


def greedy(path: Path, dtype: str = "float32", vocab_size: int = VOCAB) -> list[int]:
    maker = PlanMaker(TorchEngine(open_model(str(path)), "cpu", dtype), vocab_size=vocab_size)
    first = maker.prefill(maker.admit(0, PROMPT, 20)).tokens
    return [int(first[0]), *maker.decode([0], COUNT - 1)[0]]


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 2},
        {"rope_theta": 500.0, "rms_norm_eps": 0.1},
    ],
    ids=["tied", "biases", "head_dim", "constants"],
)
def test_variants_of_the_family(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_llama(**changes)
    with torch.no_grad():  # biases start at zero, which would prove nothing
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    assert greedy(save_tiny_llama(model, tmp_path)) == hf_greedy(model, PROMPT, COUNT)


def test_shards(hf_model: LlamaForCausalLM, tmp_path: Path) -> None:
    save_tiny_llama(hf_model, tmp_path, max_shard_size="30kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert greedy(tmp_path) == hf_greedy(hf_model, PROMPT, COUNT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_llama()
    folder = save_tiny_llama(model, tmp_path)
    halves = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    save_file(halves, folder / "model.safetensors")
    model.load_state_dict(halves)
    assert greedy(folder) == hf_greedy(model, PROMPT, COUNT)


def test_computing_in_bfloat16_stays_near(model_folder: Path, hf_model: LlamaForCausalLM) -> None:
    engine = TorchEngine(open_model(str(model_folder)), "cpu", "bfloat16")
    assert engine.describe().token_bytes == 2 * 2 * 2 * 8 * 2
    maker = PlanMaker(engine)
    assert maker.prefill(maker.admit(0, PROMPT, 20)).tokens.tolist() == hf_greedy(hf_model, PROMPT, 1)


# -- GGUF -----------------------------------------------------------------------------------------


def test_gguf_equals_the_safetensors_it_came_from(hf_model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = write_gguf(hf_model, tmp_path / "tiny.gguf")
    assert greedy(path) == hf_greedy(hf_model, PROMPT, COUNT)


def test_gguf_quantised_tensors_are_near_their_originals(
    hf_model: LlamaForCausalLM, tmp_path: Path
) -> None:
    path = write_gguf(hf_model, tmp_path / "tiny.gguf", kinds={"": Q8_0})
    weights = open_weights(open_model(str(path)), torch.float32)
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
        wanted = hf_model.state_dict()[name]
        found = weights.take(name, tuple(wanted.shape))
        assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.01


def test_gguf_refusals_name_file_and_tensor(hf_model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = write_gguf(hf_model, tmp_path / "a.gguf", without="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"a\.gguf: tensor blk\.1\.ffn_up\.weight .* is missing"):
        TorchEngine(open_model(str(path)), "cpu", "float32")
    scaled = write_gguf(hf_model, tmp_path / "b.gguf", rope_scaling=gguf.RopeScalingType.YARN)
    with pytest.raises(ModelError, match="rotary scaling of type 'yarn'"):
        TorchEngine(open_model(str(scaled)), "cpu", "float32")


# -- refusals ---------------------------------------------------------------------------------------


def changed(folder: Path, to: Path, config: dict[str, Any]) -> Path:
    shutil.copytree(folder, to)
    values = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(values | config))
    return to


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bloom"}, "family 'bloom' is not supported"),
        (
            {"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None},
            "rotary scaling of type 'yarn'",
        ),
        (
            {"rope_scaling": {"type": "linear"}, "rope_parameters": None},
            "rotary scaling of type 'linear'",
        ),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"num_hidden_layers": None}, "`num_hidden_layers`"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": 3}, r"has the tensor model\.layers\.2\."),
        ({"intermediate_size": 64}, r"mlp\.gate_proj\.weight has the shape \[48, 32\]"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(
    model_folder: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    folder = changed(model_folder, tmp_path / "changed", config)
    with pytest.raises(ModelError, match=message) as caught:
        TorchEngine(open_model(str(folder)), "cpu", "float32")
    assert str(folder) in str(caught.value)


def test_integer_weights_are_refused(model_folder: Path, tmp_path: Path) -> None:
    folder = changed(model_folder, tmp_path / "changed", {})
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is torch\.int8"):
        TorchEngine(open_model(str(folder)), "cpu", "float32")


def test_files_that_are_not_safetensors_are_refused(model_folder: Path, tmp_path: Path) -> None:
    folder = changed(model_folder, tmp_path / "changed", {})
    (folder / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
        TorchEngine(open_model(str(folder)), "cpu", "float32")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        TorchEngine(open_model(str(folder)), "cpu", "float32")


@pytest.mark.parametrize(("ends", "wanted"), [(None, (2,)), ((2, 2), (2,)), ((2, 7), (2, 7))])
def test_gguf_ends_of_texts_and_turns(
    hf_model: LlamaForCausalLM, tmp_path: Path, ends: tuple[int, int] | None, wanted: tuple[int, ...]
) -> None:
    assert open_model(str(write_gguf(hf_model, tmp_path / "a.gguf", ends=ends))).eos_token_ids == wanted


def test_gguf_ends_that_are_no_tokens_are_refused(hf_model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = write_gguf(hf_model, tmp_path / "a.gguf", ends=(2, VOCAB))
    with pytest.raises(ModelError, match=r"a\.gguf: `tokenizer\.ggml\.eot_token_id` is 300, and there"):
        open_model(str(path))
