import pytest
import torch
from kernel_inputs import (
    FORMS,
    HEADS,
    ROW_MIXES,
    AttentionCase,
    attention_case,
    plain_attention,
    relative_error,
)

from octavo.kernels.reference.kv_write import quantized
from octavo.kernels.rows import AttentionForm, KvScales
from octavo.kernels.table import CPU, REFERENCE, Kernels, kernels_named

NATIVE = kernels_named("native", "cpu")
SCALE = 0.3


def attend(kernels: Kernels, case: AttentionCase) -> torch.Tensor:
    rows = kernels.prepare_attention(case.rows, case.key_cache)
    return kernels.paged_attention(case.query, case.key_cache, case.value_cache, rows, SCALE)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mix", ROW_MIXES)
@pytest.mark.parametrize("kernels", [REFERENCE, CPU, NATIVE], ids=["reference", "cpu", "native"])
def test_equals_the_softmax_formula(kernels: Kernels, mix: str, heads: tuple[int, int]) -> None:
    case = attention_case(ROW_MIXES[mix], heads)
    before = case.key_cache.clone(), case.value_cache.clone()
    found = attend(kernels, case)
    assert relative_error(found, plain_attention(case, SCALE)) < 1e-12
    for cache, clone in zip((case.key_cache, case.value_cache), before, strict=True):
        assert torch.equal(cache.nan_to_num(123.0), clone.nan_to_num(123.0))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_cpu_in_float32_at_real_head_sizes(head_dim: int) -> None:
    case = attention_case(ROW_MIXES["mixed"], (6, 2), head_dim, block_size=16, dtype=torch.float32)
    assert relative_error(attend(CPU, case), plain_attention(case, SCALE)) < 1e-5


def test_cpu_groups_many_decodes_of_unequal_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.kernels.cpu import paged_attention as cpu

    monkeypatch.setattr(cpu, "GROUP_BYTES", 64 * 2 * 2 * 8 * 8)  # of 64 tokens
    case = attention_case([(context, 1) for context in range(0, 60, 3)], (6, 2))
    groups = cpu.prepare_attention(case.rows, case.key_cache).decodes
    assert sorted(i for group in groups for i in group.queries.tolist()) == list(range(20))
    assert 1 < len(groups) < 20
    assert relative_error(attend(CPU, case), plain_attention(case, SCALE)) < 1e-12


def test_cpu_tiles_of_a_chunk_agree_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.kernels.cpu import paged_attention as cpu

    case = attention_case(ROW_MIXES["chunks"], (6, 2))
    whole = attend(CPU, case)
    monkeypatch.setattr(cpu, "QUERY_TILE", 3)
    assert relative_error(attend(CPU, case), whole) < 1e-12


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kernels", [REFERENCE, CPU, NATIVE], ids=["reference", "cpu", "native"])
def test_windows_and_soft_caps(kernels: Kernels, form: AttentionForm) -> None:
    case = attention_case(ROW_MIXES["mixed"], (6, 2))
    rows = kernels.prepare_attention(case.rows, case.key_cache)
    caches = case.key_cache, case.value_cache
    found = kernels.paged_attention(case.query, *caches, rows, SCALE, form)
    assert relative_error(found, plain_attention(case, SCALE, form)) < 1e-12


@pytest.mark.parametrize("kernels", [REFERENCE, CPU, NATIVE], ids=["reference", "cpu", "native"])
def test_fp8_entries_stand_for_their_value_times_the_scale(kernels: Kernels) -> None:
    scales = KvScales(torch.tensor([0.05, 0.5]), torch.tensor([0.5, 0.01]))
    case = attention_case(ROW_MIXES["mixed"], (6, 2))
    stored = []
    for cache, factors in ((case.key_cache, scales.keys), (case.value_cache, scales.values)):
        heads = quantized(cache.transpose(1, 2).flatten(0, 1), factors, torch.float8_e4m3fn)
        restored = heads.double() * factors.double()[:, None]
        stored.append(heads.view(-1, 4, 2, 8).transpose(1, 2))
        cache.copy_(restored.view(-1, 4, 2, 8).transpose(1, 2))
    rows = kernels.prepare_attention(case.rows, case.key_cache)
    found = kernels.paged_attention(case.query, *stored, rows, SCALE, scales=scales)
    assert relative_error(found, attend(REFERENCE, case)) < 1e-12
