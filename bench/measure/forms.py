"""The demo model in other forms than the one that it comes in."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from octavo.common.modelfiles import ModelFiles, open_model
from octavo.dataplane.loading.weights import open_weights
from octavo.dataplane.models.config import DecoderConfig


def demo_as_safetensors(folder: Path) -> Path:
    """The demo's tensors in bfloat16, with a configuration that workers read."""
    files = open_model("demo")
    weights = open_weights(files, torch.bfloat16)
    tensors = {name: weights.take(name, shape).contiguous() for name, shape in _shapes(files).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = files.config | {"eos_token_id": list(files.eos_token_ids), "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _shapes(files: ModelFiles) -> dict[str, tuple[int, ...]]:
    """All tensors of a Llama, by their names."""
    config = DecoderConfig.read(files)
    size, inner, vocab = config.hidden_size, config.inner_size, config.vocab_size
    attended, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, size), "model.norm": (size,)}
    if not config.tied:
        shapes["lm_head"] = (vocab, size)
    layer = {
        "input_layernorm": (size,),
        "post_attention_layernorm": (size,),
        "self_attn.q_proj": (attended, size),
        "self_attn.k_proj": (kv, size),
        "self_attn.v_proj": (kv, size),
        "self_attn.o_proj": (size, attended),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    for number in range(config.num_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}
