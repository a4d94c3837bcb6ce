"""Paged attention in Triton's interpreter against the softmax formula in float64.

The interpreter multiplies bfloat16 wrongly, so types here are float32, float16 and fp8 caches.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_inputs import FORMS, ROW_MIXES, AttentionCase, attention_case, relative_error
from torch import Tensor

from octavo.kernels.reference import paged_attention as reference
from octavo.kernels.reference.kv_write import quantized
from octavo.kernels.rows import PLAIN, AttentionForm, AttentionRows, KvScales
from octavo.kernels.table import kernels_named

TRITON = kernels_named("triton", "cpu")
SCALE = 0.3
LIMITS = {torch.float32: 1e-6, torch.float16: 5e-4}

# Borders of blocks of 16: 0, 1, B-1, B, B+1 and many, as decodes, chunks and both with an empty row.
MIXES = {
    "decodes": [(0, 1), (1, 1), (14, 1), (15, 1), (16, 1), (17, 1), (150, 1)],
    "chunks": [(0, 1), (0, 15), (0, 16), (0, 17), (16, 3), (1, 40), (70, 20)],
    "mixed": [(90, 1), (0, 33), (0, 0), (15, 1), (16, 16), (0, 1)],
}
# (mix, query heads, KV heads, head size, block size, type): every group, size and border at least once.
CASES = [
    ("decodes", 2, 2, 64, 16, torch.float16),
    ("decodes", 6, 2, 80, 8, torch.float32),
    ("decodes", 7, 1, 128, 32, torch.float16),
    ("chunks", 4, 1, 96, 16, torch.float32),
    ("chunks", 7, 1, 64, 16, torch.float16),
    ("chunks", 2, 2, 128, 128, torch.float16),
    ("mixed", 4, 1, 128, 16, torch.float16),
    ("mixed", 6, 2, 96, 24, torch.float32),
    ("mixed", 14, 2, 80, 64, torch.float16),
    ("mixed", 20, 1, 256, 16, torch.float16),
    ("mixed", 2, 1, 8, 4, torch.float32),
]


def wanted(case: AttentionCase, form: AttentionForm = PLAIN, scales: KvScales | None = None) -> Tensor:
    """What the reference says in float64."""
    caches = [cache if scales else cache.double() for cache in (case.key_cache, case.value_cache)]
    return reference.paged_attention(case.query.double(), *caches, case.rows, SCALE, form, scales)


def apart(cache: Tensor, gap: int) -> Tensor:
    """The same cache with `gap` entries of NaN between heads, so that strides are not the shape's."""
    blocks, heads, size, dim = cache.shape
    wide = torch.full((blocks, heads * size * dim + gap * heads), float("nan"), dtype=cache.dtype)
    view = wide.as_strided(cache.shape, (wide.stride(0), size * dim + gap, dim, 1))
    view.copy_(cache)
    return view


def attend(case: AttentionCase, form: AttentionForm = PLAIN, scales: KvScales | None = None) -> Tensor:
    rows = TRITON.prepare_attention(case.rows, case.key_cache)
    return TRITON.paged_attention(
        case.query, case.key_cache, case.value_cache, rows, SCALE, form, scales
    )


@pytest.mark.parametrize(("mix", "heads", "kv_heads", "head_dim", "block_size", "dtype"), CASES)
def test_equals_the_reference(
    mix: str, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    case = attention_case(MIXES[mix], (heads, kv_heads), head_dim, block_size, dtype)
    case.key_cache, case.value_cache = apart(case.key_cache, 16), apart(case.value_cache, 32)
    before = case.key_cache.clone(), case.value_cache.clone()
    assert relative_error(attend(case), wanted(case)) < LIMITS[dtype]
    for cache, clone in zip((case.key_cache, case.value_cache), before, strict=True):
        assert torch.equal(cache.nan_to_num(123.0), clone.nan_to_num(123.0))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("mix", ["decodes", "mixed"])
def test_windows_and_soft_caps(mix: str, form: AttentionForm) -> None:
    case = attention_case(MIXES[mix], (6, 2), 64, 16, torch.float32)
    plain = wanted(case)
    assert relative_error(plain, wanted(case, form)) > 1e-2  # the form matters here
    assert relative_error(attend(case, form), wanted(case, form)) < 2e-6


def attend_split(case: AttentionCase, tokens: int, form: AttentionForm = PLAIN) -> Tensor:
    from octavo.kernels.triton.paged_attention import paged_attention

    caches = case.key_cache, case.value_cache
    return paged_attention(case.query, *caches, case.rows, SCALE, form, split_tokens=tokens)


@pytest.mark.parametrize("form", [PLAIN, AttentionForm(window=50)], ids=["plain", "window"])
@pytest.mark.parametrize(("heads", "block_size"), [((6, 2), 16), ((7, 1), 24)])
def test_two_split_counts_agree(heads: tuple[int, int], block_size: int, form: AttentionForm) -> None:
    mix = [(15, 1), (0, 7), (63, 1), (64, 1), (0, 0), (170, 1)]
    case = attention_case(mix, heads, 64, block_size, torch.float32)
    for tokens in (16, 64):
        assert relative_error(attend_split(case, tokens, form), wanted(case, form)) < 2e-6


def test_a_decode_does_not_depend_on_its_batch() -> None:
    mix = [(600, 1), (90, 1), (520, 1)]
    case = attention_case(mix, (4, 1), 64, 16, torch.float32)
    together = attend(case)
    for row in range(len(mix)):
        assert torch.equal(together[row : row + 1], attend(only(case, row)))


def only(case: AttentionCase, row: int) -> AttentionCase:
    """One decode of a case alone."""
    first, last = case.rows.block_begins[row : row + 2].tolist()
    rows = AttentionRows(
        query_begins=torch.tensor([0, 1]),
        context_lens=case.rows.context_lens[row : row + 1],
        block_indices=case.rows.block_indices[first:last],
        block_begins=torch.tensor([0, last - first]),
    )
    return replace(case, query=case.query[row : row + 1], rows=rows)


@pytest.mark.parametrize("mix", ["decodes", "mixed"])
def test_fp8_caches_with_scales_of_each_head(mix: str) -> None:
    case = attention_case(MIXES[mix], (6, 2), 80, 16, torch.float32)
    scales = KvScales(torch.tensor([0.02, 0.5]), torch.tensor([1.5, 0.01]))
    dtype = torch.float8_e4m3fn
    for name, factors in (("key_cache", scales.keys), ("value_cache", scales.values)):
        cache = getattr(case, name)
        stored = quantized(cache.transpose(1, 2).flatten(0, 1), factors, dtype)
        blocks, heads, size, dim = cache.shape
        setattr(case, name, stored.view(blocks, size, heads, dim).transpose(1, 2).contiguous())
    exact = wanted(case, scales=scales)
    assert relative_error(attend(case, scales=scales), exact) < 1e-6
    assert relative_error(attend_fp8_split(case, scales), exact) < 1e-6


def attend_fp8_split(case: AttentionCase, scales: KvScales) -> Tensor:
    from octavo.kernels.triton.paged_attention import paged_attention

    caches = case.key_cache, case.value_cache
    return paged_attention(case.query, *caches, case.rows, SCALE, PLAIN, scales, split_tokens=32)


def test_queries_outside_all_rows_get_zeros() -> None:
    case = attention_case([(20, 1), (0, 5)], (2, 2), 64, 16, torch.float32)
    padded = torch.cat((case.query, torch.full((3, 2, 64), float("nan"))))
    found = attend(replace(case, query=padded))
    assert relative_error(found[:6], wanted(case)) < 1e-6
    assert not found[6:].any()
    none = replace(
        case, query=case.query[:0], rows=AttentionRows(*[torch.zeros(1, dtype=torch.int64)] * 4)
    )
    assert attend(replace(none, rows=replace(none.rows, context_lens=torch.zeros(0)))).shape == (
        0,
        2,
        64,
    )


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda case: replace(case, query=case.query.half()), "float16 queries"),
        (lambda case: replace(case, query=case.query[:, :3]), "does not fit"),
        (lambda case: replace(case, query=case.query.transpose(1, 2)), "contiguous"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(
    change: Callable[[AttentionCase], AttentionCase], fault: str
) -> None:
    case = attention_case([(3, 1)], (4, 2), 64, 16, torch.float32)
    with pytest.raises(ValueError, match=fault):
        attend(change(case))


@pytest.mark.parametrize("mix", ["decodes", "chunks", "mixed"])
def test_small_blocks_and_heads(mix: str) -> None:
    case = attention_case(ROW_MIXES[mix], (4, 1), dtype=torch.float32)
    assert relative_error(attend(case), wanted(case)) < 1e-6
