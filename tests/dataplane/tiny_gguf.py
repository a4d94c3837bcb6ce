"""The tiny Llama as a GGUF file."""

from pathlib import Path

import gguf
import numpy as np
from gguf_types import stored
from tiny_llama import VOCAB
from transformers import LlamaForCausalLM

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(
    model: LlamaForCausalLM,
    path: Path,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    without: str = "",
    rope_scaling: gguf.RopeScalingType | None = None,
    ends: tuple[int, int] | None = None,
) -> Path:
    """The model as llama.cpp's converter writes it: rows of Q and K in interleaved order.

    Args:
        kinds: how matrices are stored whose names have the key in them, of several keys the last; the
            others, and those whose rows are not whole blocks, are in float32.
        without: the name of a tensor to leave out.
        ends: the tokens that end a text and a turn; by default there is only the first, 2.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(int(config.num_key_value_heads or 0))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_token_list([f"<{i}>" for i in range(VOCAB)])
    writer.add_eos_token_id(ends[0] if ends else 2)
    if ends:
        writer.add_eot_token_id(ends[1])
    if rope_scaling is not None:
        writer.add_rope_scaling_type(rope_scaling)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:
                halves = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
                values = halves.swapaxes(1, 2).reshape(values.shape)
        own_name = names.get_name(name, try_suffixes=(".weight",))
        if own_name is None or own_name == without:
            continue
        kind = _kind_of(own_name, values.shape, kinds or {})
        if kind is None:
            writer.add_tensor(own_name, np.ascontiguousarray(values))
        else:
            writer.add_tensor(own_name, stored(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind_of(
    name: str, shape: tuple[int, ...], kinds: dict[str, gguf.GGMLQuantizationType]
) -> gguf.GGMLQuantizationType | None:
    kind = next((kind for part, kind in reversed(kinds.items()) if part in name), None)
    if kind is None or len(shape) != 2 or shape[1] % gguf.GGML_QUANT_SIZES[kind][0]:
        return None
    return kind
