"""Tensors in every type of GGUF that is read, as the bytes of a file."""

import gguf
import numpy as np

KINDS = gguf.GGMLQuantizationType

QUANTIZED = (
    KINDS.F32,
    KINDS.F16,
    KINDS.BF16,
    KINDS.Q8_0,
    KINDS.Q4_0,
    KINDS.Q4_1,
    KINDS.Q5_0,
    KINDS.Q5_1,
    KINDS.TQ1_0,
    KINDS.TQ2_0,
    KINDS.MXFP4,
)  # by the library
# For the others: where in a block the float16 are that its values are multiples of.
_SCALES = {
    KINDS.Q2_K: (80, 82),
    KINDS.Q3_K: (108,),
    KINDS.Q4_K: (0, 2),
    KINDS.Q5_K: (0, 2),
    KINDS.Q6_K: (208,),
    KINDS.IQ1_S: (0,),
    KINDS.IQ2_XXS: (0,),
    KINDS.IQ2_XS: (0,),
    KINDS.IQ2_S: (0,),
    KINDS.IQ3_XXS: (0,),
    KINDS.IQ3_S: (0,),
    KINDS.IQ4_NL: (0,),
    KINDS.IQ4_XS: (0,),
}
READ = (*QUANTIZED, *_SCALES)


def stored(values: np.ndarray, kind: KINDS, seed: int = 0) -> np.ndarray:
    """``[rows, bytes of a row]``: the values quantised or, where the library cannot, a valid tensor of
    that shape in which all else is random."""
    if kind in QUANTIZED:
        return gguf.quants.quantize(values, kind).view(np.uint8)
    count, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (len(values), values.shape[1] // count, size), dtype=np.uint8)
    for offset in _SCALES[kind]:
        scales = rng.normal(0, 2e-4, blocks.shape[:2]).astype("<f2")
        blocks[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(len(values), -1)
