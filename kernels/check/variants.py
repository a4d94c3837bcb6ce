"""The variants of each kernel that models use, with the launch parameters that a card gets."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.kernels.reference.sampling import MIN_TEMPERATURE
from octavo.kernels.triton import block_copy, block_swap, sampling, silu_mul, split_decode
from octavo.kernels.triton.arch import GFX_942, SM_80, SM_90, Arch
from octavo.kernels.triton.helpers import padded, padded_head, warps_for
from octavo.kernels.triton.kv_write import write_tokens
from octavo.kernels.triton.paged_attention import attend_rows
from octavo.kernels.triton.rms_norm import normalize_rows
from octavo.kernels.triton.rotary import rotate_and_write, rotate_heads
from octavo.kernels.triton.tiles import SPLIT_TOKENS, Tiles, chunk_tiles, decode_tiles

ARCHS = (SM_80, SM_90, GFX_942)
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 3, 4, 7, 8)
BLOCK_SIZES = (8, 16, 32, 64, 128)
TYPES = ("fp16", "bf16", "fp8")  # of the cache; queries are bf16 where it is fp8
VOCABULARY = 49_152

# Arguments of each type; those that are neither here nor constants are strides.
_ARGUMENTS = {
    "*{plain}": "output query keys values heads rotations normed total hidden residual weight product "
    "gate_up",
    "*{cache}": "key_cache value_cache",
    "*fp32": "partial sums_log2 key_scales value_scales logits normalizers temperatures",
    "*fp64": "top_ps min_ps",
    "*i64": "query_begins context_lens block_indices block_begins kv_slots addresses strides blocks "
    "sources destinations tokens top_ks seeds positions samples",
    "*i32": "staging",
    "fp32": "scale epsilon",
    "i32": "num_rows num_pairs vocab_size",
}
_TYPE_OF = {name: kind for kind, names in _ARGUMENTS.items() for name in names.split()}


@dataclass(frozen=True)
class Variant:
    """One kernel with all that is known when it is compiled."""

    kernel: Any  # a function of triton.jit
    label: str
    arch: Arch
    dtype: str  # fp16, bf16, fp32 or fp8
    constants: dict[str, Any]
    options: dict[str, Any]  # num_warps and so on
    is_attention: bool = False
    wants_wide_matrix: bool = False  # enough rows for instructions on 64 at once
    tile: str = ""
    part: str = ""  # what the documentation shows this variant under; empty: by its label

    @property
    def family(self) -> str:
        """The line of the documentation's table that this variant belongs to."""
        return self.part or self.label or "all"

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def signature(self) -> dict[str, str]:
        """The type of each argument, by name."""
        return {name: self._type(name) for name in self.kernel.arg_names}

    def aligned(self) -> list[int]:
        """Arguments that are multiples of 16: addresses, and strides of ordinary models."""
        return [
            index
            for index, name in enumerate(self.kernel.arg_names)
            if name not in self.constants and _TYPE_OF.get(name, "*").startswith("*")
        ]

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        fp8 = self.dtype == "fp8"
        plain, cache = ("bf16", "u8") if fp8 else (self.dtype, self.dtype)
        return _TYPE_OF.get(name, "i32").format(plain=plain, cache=cache)


def warps(number: int) -> dict[str, Any]:
    """The options of kernels that leave all but the warps to the compiler."""
    return {"num_warps": number}


def variants(archs: tuple[Arch, ...] = ARCHS) -> Iterator[Variant]:
    """All of them, for each architecture."""
    for arch in archs:
        yield from _attention(arch)
        yield from _layers(arch)
        yield from _blocks(arch)
        yield from _sampling(arch)


def _attention(arch: Arch) -> Iterator[Variant]:
    """Every head size with every group; block sizes and types take turns."""
    for i, head_dim in enumerate(HEAD_DIMS):
        for j, group in enumerate(GROUPS):
            block_size = BLOCK_SIZES[(i + j) % len(BLOCK_SIZES)]
            dtype = TYPES[(i + 2 * j) % len(TYPES)]
            yield from attention_variants(arch, head_dim, group, block_size, dtype)
    yield from attention_variants(arch, 256, 4, 16, "bf16", window=4096, soft_cap=50.0)
    yield from attention_variants(arch, 64, 8, 16, "bf16", window=128)
    yield from attention_variants(arch, 128, 4, 16, "fp32")


def attention_variants(
    arch: Arch,
    head_dim: int,
    group: int,
    block_size: int,
    dtype: str,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Iterator[Variant]:
    """Chunks, decodes, and the two kernels of split decodes."""
    itemsize = {"fp32": 4, "fp8": 1}.get(dtype, 2)
    constants: dict[str, Any] = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_PADDED": padded_head(head_dim),
        "BLOCK_SIZE": block_size,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
        "SPLIT": SPLIT_TOKENS,
    }
    if dtype != "fp8":
        constants |= {"key_scales": None, "value_scales": None}
    label = (
        f"d{head_dim} g{group} b{block_size}"
        + (" window" if window else "")
        + (" cap" if soft_cap else "")
    )
    decode = decode_tiles(arch, group, head_dim, itemsize)
    chunk = chunk_tiles(arch, group, head_dim, itemsize)
    make = partial(_tiled, arch=arch, dtype=dtype, constants=constants)
    yield make(attend_rows, f"chunks {label}", tiles=chunk)
    yield make(attend_rows, f"decodes {label}", tiles=decode)
    yield make(split_decode.attend_split, f"splits {label}", tiles=decode)
    joined = {name: constants[name] for name in ("HEAD_DIM", "HEAD_PADDED", "BLOCK_SIZE", "SPLIT")}
    joined["JOINED"] = split_decode.JOINED
    label = f"join {label}"
    part = _part(label, dtype)
    yield Variant(split_decode.join_splits, label, arch, dtype, joined, warps(4), part=part)


def _part(label: str, dtype: str) -> str:
    """Kind and head size, as in ``chunks d128``; float32 apart."""
    return " ".join(label.split()[:2]) + (" fp32" if dtype == "fp32" else "")


def _tiled(
    kernel: Any, label: str, tiles: Tiles, arch: Arch, dtype: str, constants: dict[str, Any]
) -> Variant:
    return Variant(
        kernel,
        label,
        arch,
        dtype,
        {**constants, "ROWS": tiles.rows, "KEYS": tiles.keys},
        options=tiles.options(),
        is_attention=True,
        wants_wide_matrix=arch.wide_matrix and tiles.rows >= 64 and dtype != "fp32",
        tile=f"{tiles.rows} x {tiles.keys}",
        part=_part(label, dtype),
    )


def _layers(arch: Arch) -> Iterator[Variant]:
    """What else the layers of a model of 32 heads of 128 over 8 KV heads run."""
    for dtype in ("bf16", "fp32"):
        for size in (576, 4096):
            constants: dict[str, Any] = {"SIZE": size, "SIZE_PADDED": padded(size)}
            alone = {**constants, "total": None, "residual": None}
            number = warps(warps_for(size))
            yield Variant(normalize_rows, f"norm {size}", arch, dtype, alone, number)
            yield Variant(normalize_rows, f"add and norm {size}", arch, dtype, constants, number)
        width = silu_mul.WIDTH
        yield Variant(
            silu_mul.gate_rows,
            "14336",
            arch,
            dtype,
            {"SIZE": 14_336, "WIDTH": width},
            warps(warps_for(width)),
        )
        half = {"HALF": 64, "HALF_PADDED": 64}
        heads = {"NUM_HEADS": 40, "HEADS_PADDED": 64}
        yield Variant(
            rotate_heads, "d128 40 heads", arch, dtype, {**half, **heads}, warps(warps_for(40 * 64))
        )
    for dtype in TYPES:
        yield from _writes(arch, dtype)


def _writes(arch: Arch, dtype: str) -> Iterator[Variant]:
    scales = {} if dtype == "fp8" else {"key_scales": None, "value_scales": None}
    for block_size in (8, 16, 128):
        constants = {**scales, "BLOCK_SIZE": block_size}
        heads = {"NUM_HEADS": 8, "HEADS_PADDED": 8, "HEAD_DIM": 128, "HEAD_PADDED": 128}
        label = f"d128 8 heads b{block_size}"
        yield Variant(
            write_tokens, label, arch, dtype, {**constants, **heads}, warps(warps_for(8 * 128))
        )
    fused = {"NUM_HEADS": 32, "HEADS_PADDED": 32, "NUM_KV_HEADS": 8, "KV_HEADS_PADDED": 8}
    half = {"HALF": 64, "HALF_PADDED": 64, "BLOCK_SIZE": 16}
    yield Variant(
        rotate_and_write,
        "d128 32 + 8 heads",
        arch,
        dtype,
        {**scales, **fused, **half},
        warps(warps_for(32 * 64)),
    )


def _blocks(arch: Arch) -> Iterator[Variant]:
    words = 8 * 16 * 128 // 2  # of a block of 16 tokens, 8 KV heads of 128, bf16
    for pairs in block_copy.ROOM_FOR:
        constants = {"WORDS": words, "PAIRS": pairs, "RUN": block_copy.HELD_WORDS // pairs}
        yield Variant(block_copy.copy_blocks, f"{pairs} pairs", arch, "bf16", constants, warps(4))
    moved = {"WORDS": words, "RUN": block_swap.RUN}
    yield Variant(block_swap.gather_blocks, "bf16", arch, "bf16", moved, warps(4))
    yield Variant(block_swap.scatter_blocks, "bf16", arch, "bf16", moved, warps(4))


def _sampling(arch: Arch) -> Iterator[Variant]:
    constants = {"BLOCK": sampling.BLOCK}
    drawing = {**constants, "NARROW": sampling.NARROW, "LEAST": MIN_TEMPERATURE}
    yield Variant(sampling.draw_rows, "", arch, "fp32", drawing, warps(sampling.NUM_WARPS))
    yield Variant(sampling.normalize_logits, "", arch, "fp32", constants, warps(sampling.NUM_WARPS))
