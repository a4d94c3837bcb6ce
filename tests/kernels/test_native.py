"""The operations in C, on every instruction set that is here, with 1 to 3 threads, in float32."""

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kernel_inputs import (
    FORMS,
    HEADS,
    ROW_MIXES,
    attention_case,
    begins,
    plain_attention,
    relative_error,
)

from octavo.dataplane.loading.grouped import GroupedMatrix, pack_nibbles
from octavo.kernels.cpu import _native, native
from octavo.kernels.reference.philox import gumbel_noise
from octavo.kernels.reference.rotary import inverse_frequencies, rotary_table
from octavo.kernels.reference.sampling import DrawParams, scale
from octavo.kernels.rows import PLAIN, AttentionForm, AttentionRows
from octavo.kernels.table import CPU, REFERENCE

SETS = _native.instruction_sets()


@pytest.fixture(params=[(name, threads) for name in SETS for threads in (1, 2, 3)], ids=str)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """An instruction set and a number of threads."""
    name, threads = request.param
    _native.use_instruction_set(name)
    _native.set_threads(threads)
    yield
    _native.use_instruction_set(SETS[0])
    _native.set_threads(1)


def test_every_processor_has_the_generic_set() -> None:
    assert SETS[-1] == "generic"
    with pytest.raises(ValueError, match="no instruction set mmx"):
        _native.use_instruction_set("mmx")
    with pytest.raises(ValueError, match="threads is 0, not 1 to 256"):
        _native.set_threads(0)


# -- products ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("in_size", "out_size"), [(576, 192), (1536, 64), (33, 17), (5, 1), (100, 75), (1, 33)]
)
def test_products_of_any_size(in_size: int, out_size: int) -> None:
    chance = torch.Generator().manual_seed(in_size)
    weight, bias = torch.randn(out_size, in_size, generator=chance), torch.randn(out_size)
    packed = native.prepare_linear(weight)
    assert isinstance(packed, native.PackedWeight)
    for rows in (0, 1, 2, 3, 7, 12, 13, 37, 100, 150, 361):
        hidden = torch.randn(rows, in_size, generator=chance)
        for added in (None, bias):
            found = native.linear(hidden, packed, added)
            wanted = hidden.double() @ weight.double().T + (0 if added is None else added.double())
            assert found.shape == (rows, out_size)
            assert (found.double() - wanted).norm() <= 1e-6 * max(float(wanted.norm()), 1.0)


@pytest.mark.usefixtures("way")
def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    packed = native.prepare_linear(torch.randn(75, 300))
    hidden = torch.randn(200, 300)
    together = native.linear(hidden, packed, None)
    for first, last in ((0, 1), (3, 5), (50, 63), (120, 200)):
        assert torch.equal(native.linear(hidden[first:last], packed, None), together[first:last])


def test_a_product_of_other_sizes_or_types_is_refused() -> None:
    packed = native.prepare_linear(torch.randn(8, 6))
    with pytest.raises(ValueError, match=r"a product of 5 torch\.float32 with 6 float32 columns"):
        native.linear(torch.randn(2, 5), packed, None)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        native.linear(torch.randn(2, 6, dtype=torch.float64), packed, None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("bits", "zeros"), [(4, True), (8, False), (8, True)])
def test_products_with_integers(bits: int, zeros: bool) -> None:
    for out_size, groups in ((64, 18), (75, 3), (1, 1)):
        matrix = _random_matrix(bits, zeros, out_size, groups)
        packed = native.prepare_linear(matrix)
        weight, bias = torch.from_numpy(matrix.values()).double(), torch.randn(out_size)
        hidden = torch.randn(230, 32 * groups)
        together = native.linear(hidden, packed, bias)
        for rows in (0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 13, 16, 17, 97, 230):
            found = native.linear(hidden[:rows], packed, bias)
            assert torch.equal(found, together[:rows])
            wanted = hidden[:rows].double() @ weight.T + bias.double()
            summed = hidden[:rows].abs().double() @ weight.abs().T + 1  # what cancels rounds as well
            assert ((found.double() - wanted).abs() <= 2e-6 * summed).all()
            plain = native.linear(hidden[:rows], packed, None)
            assert torch.allclose(plain + bias, found, rtol=1e-4, atol=1e-3)


def _random_matrix(bits: int, zeros: bool, out_size: int, groups: int) -> GroupedMatrix:
    chance = np.random.default_rng(bits)
    integers = (
        pack_nibbles(chance.integers(0, 16, (out_size, groups, 32), np.uint8))
        if bits == 4
        else chance.integers(-128, 128, (out_size, groups, 32), np.int8)
    )
    scales, zero = chance.random((2, out_size, groups), np.float32)
    return GroupedMatrix(bits, integers, scales, zero * 15 if zeros else None)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("activation_bits", [16, 8])
@pytest.mark.parametrize(("bits", "zeros"), [(4, True), (8, False), (8, True)])
def test_products_of_integers(bits: int, zeros: bool, activation_bits: int) -> None:
    for out_size, groups in ((64, 18), (75, 3), (1, 1)):
        matrix = _random_matrix(bits, zeros, out_size, groups)
        packed = native.prepare_linear(matrix, activation_bits)
        weight, bias = torch.from_numpy(matrix.values()).double(), torch.randn(out_size)
        hidden = torch.randn(230, 32 * groups) * torch.logspace(-3, 3, 230)[:, None]
        hidden[7] = 0
        together = native.linear(hidden, packed, bias)
        for rows in (0, 1, 2, 3, 4, 5, 6, 7, 13, 97, 230):
            found = native.linear(hidden[:rows], packed, bias)
            assert torch.equal(found, together[:rows])
        # Half a step at most is lost of every factor, and what cancels rounds as well.
        largest = hidden.view(230, groups, 32).abs().amax(dim=-1).repeat_interleave(32, 1)
        step = largest.double() / {16: 127 * 256, 8: 127}[activation_bits]
        lost = (0.501 * step + 2e-6 * hidden.abs()) @ weight.abs().T + 1e-6 * bias.abs()
        assert ((together.double() - hidden.double() @ weight.T - bias).abs() <= lost).all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_spoils_its_own_row_only(spoilt: float) -> None:
    packed = native.prepare_linear(_random_matrix(4, True, 40, 3), 16)
    hidden = torch.randn(5, 96)
    kept = native.linear(hidden, packed, None)
    hidden[2, 50] = spoilt
    found = native.linear(hidden, packed, None)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], kept[[0, 1, 3, 4]])


# -- attention --------------------------------------------------------------------------------------

LONG = [(700, 1), (0, 200), (255, 1), (256, 1), (511, 3), (513, 1), (0, 1), (31, 130)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mix", ROW_MIXES)
def test_attention_equals_the_softmax_formula(mix: str, heads: tuple[int, int]) -> None:
    case = attention_case(ROW_MIXES[mix], heads, dtype=torch.float32)
    before = case.key_cache.clone(), case.value_cache.clone()
    rows = native.prepare_attention(case.rows, case.key_cache)
    found = native.paged_attention(case.query, case.key_cache, case.value_cache, rows, 0.3)
    assert relative_error(found, plain_attention(case, 0.3)) < 1e-5
    for cache, clone in zip((case.key_cache, case.value_cache), before, strict=True):
        assert torch.equal(cache.nan_to_num(123.0), clone.nan_to_num(123.0))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("head_dim", "block_size", "heads", "form"),
    [
        (64, 16, (6, 2), PLAIN),
        (64, 32, (7, 1), AttentionForm(window=300)),
        (80, 16, (2, 2), AttentionForm(window=64, soft_cap=2.0)),
        (96, 8, (4, 1), AttentionForm(soft_cap=5.0)),
        (128, 16, (9, 1), AttentionForm(window=1)),
        (22, 5, (6, 2), AttentionForm(window=257)),
    ],
)
def test_attention_over_segments_and_tiles(
    head_dim: int, block_size: int, heads: tuple[int, int], form: AttentionForm
) -> None:
    case = attention_case(LONG, heads, head_dim, block_size, torch.float32)
    rows = native.prepare_attention(case.rows, case.key_cache)
    caches = case.key_cache, case.value_cache
    found = native.paged_attention(case.query, *caches, rows, head_dim**-0.5, form)
    wanted = REFERENCE.paged_attention(
        case.query.double(),
        *(cache.double() for cache in caches),
        case.rows,
        head_dim**-0.5,
        form,
    )
    assert relative_error(found, wanted) < 1e-5


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_windows_and_soft_caps(form: AttentionForm) -> None:
    case = attention_case(ROW_MIXES["mixed"], (6, 2), dtype=torch.float32)
    rows = native.prepare_attention(case.rows, case.key_cache)
    found = native.paged_attention(case.query, case.key_cache, case.value_cache, rows, 0.3, form)
    assert relative_error(found, plain_attention(case, 0.3, form)) < 1e-5


def test_tokens_outside_all_rows_get_zeros() -> None:
    case = attention_case([(3, 1), (0, 2)], (2, 2), dtype=torch.float32)
    query = torch.cat((torch.ones(2, 2, 8), case.query, torch.ones(3, 2, 8)))
    shifted = AttentionRows(
        case.rows.query_begins + 2,
        case.rows.context_lens,
        case.rows.block_indices,
        case.rows.block_begins,
    )
    rows = native.prepare_attention(shifted, case.key_cache)
    found = native.paged_attention(query, case.key_cache, case.value_cache, rows, 0.3)
    assert not found[:2].any()
    assert not found[-3:].any()
    assert relative_error(found[2:-3], plain_attention(case, 0.3)) < 1e-5


def test_tables_that_leave_the_cache_are_refused() -> None:
    cache = torch.zeros(4, 1, 4, 8)
    one, context = torch.tensor([0, 1]), torch.tensor([4])
    for blocks, message in (([1], "too short"), ([1, 4], "does not have"), ([-1, 2], "does not have")):
        rows = AttentionRows(one, context, torch.tensor(blocks), torch.tensor([0, len(blocks)]))
        with pytest.raises(IndexError, match=message):
            native.prepare_attention(rows, cache)
    with pytest.raises(ValueError, match="2 and 3 borders of 1 rows"):
        native.prepare_attention(AttentionRows(one, context, one, torch.tensor([0, 1, 2])), cache)
    with pytest.raises(IndexError, match="KV slot 16 in a cache of 4 blocks"):
        native.prepare_kv_write(torch.tensor([3, 16]), cache)


# -- the operations between -------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 8), (3, 576), (70, 1000), (5, 33)])
def test_norms_and_gates(rows: int, size: int) -> None:
    hidden, residual, weight = torch.randn(rows, size) * 5, torch.randn(rows, size), torch.rand(size)
    normed = native.rms_norm(hidden, weight, 1e-5)
    assert torch.allclose(
        normed.double(), REFERENCE.rms_norm(hidden.double(), weight.double(), 1e-5), atol=1e-5
    )
    both, total = native.add_rms_norm(hidden, residual, weight, 1e-5)
    assert torch.equal(total, hidden + residual)
    assert torch.equal(both, native.rms_norm(total, weight, 1e-5))
    pair = torch.cat((hidden * 30, residual), dim=1)  # far into both tails of the exponential
    wanted = REFERENCE.silu_mul(pair.double())
    assert torch.allclose(native.silu_mul(pair).double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [((3, 1), 64, 16), ((7, 1), 22, 5)])
def test_rotation_and_writing(heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    tokens, (queries, kv) = 90, heads
    packed = torch.randn(tokens, queries + 2 * kv, head_dim)
    turns = rotary_table(inverse_frequencies(head_dim, 10_000.0), 200)[torch.randperm(200)[:tokens]]
    slots = torch.randperm(24 * block_size)[:tokens]
    slots[[2, 17]] = -1
    found, wanted = (
        [torch.full((24, kv, block_size, head_dim), float("nan")) for _ in range(2)] for _ in range(2)
    )
    prepared = native.prepare_kv_write(slots, found[0])
    query = native.rotary_kv_write(packed, turns, *found, prepared)
    in_torch = CPU.prepare_kv_write(slots, wanted[0])
    assert relative_error(query, CPU.rotary_kv_write(packed, turns, *wanted, in_torch)) < 1e-6
    for cache, other in zip(found, wanted, strict=True):
        assert torch.equal(cache.isnan(), other.isnan())
        assert relative_error(cache.nan_to_num(0), other.nan_to_num(0)) < 1e-6


# -- the largest ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("rows", "size"),
    [(0, 5), (1, 1), (3, 7), (2, 1024), (9, 1037), (1, 49152), (8, 16385), (2, 99_999)],
)
def test_the_largest_of_rows(rows: int, size: int) -> None:
    chance = torch.Generator().manual_seed(size)
    plain = torch.randn(rows, size, generator=chance) - 9
    coarse = torch.randint(-3, 3, (rows, size), generator=chance).float()  # many equals, also -0.0
    some = torch.rand(rows, size, generator=chance) < 3 / size
    cases = [plain, coarse, coarse * -0.0, torch.full_like(plain, float("-inf"))]
    cases += [torch.where(some, value, plain) for value in (float("nan"), float("inf"), 0.0)]
    cases += [torch.where(some, float("nan"), cases[3])]
    for values in cases:
        assert torch.equal(native.argmax(values), values.argmax(dim=1))


def test_the_largest_at_each_place_of_a_row() -> None:
    for size in (33, 2 * 16384 + 5):
        for place in (0, 1, 15, 16, 31, 32, size - 6, size - 5, size - 1):
            for value in (-1.0, float("nan")):
                values = torch.full((1, size), -2.0)
                values[0, place] = values[0, -1] = value
                assert native.argmax(values).item() == place


def test_the_largest_of_other_types_and_layouts() -> None:
    values = torch.randn(6, 40)
    assert torch.equal(native.argmax(values.T), values.T.argmax(dim=1))
    assert torch.equal(native.argmax(values.double()), values.argmax(dim=1))
    with pytest.raises(IndexError):  # torch's own error
        native.argmax(torch.empty(2, 0))


# -- draws ------------------------------------------------------------------------------------------


def _draw_params(rows: int, chance: torch.Generator) -> DrawParams:
    whole = (rows,)
    return DrawParams(
        temperature=0.3 + 2 * torch.rand(rows, generator=chance),
        top_k=torch.zeros(whole, dtype=torch.int64),
        top_p=torch.ones(whole, dtype=torch.float64),
        min_p=torch.zeros(whole, dtype=torch.float64),
        seeds=torch.randint(-(2**63), 2**63 - 1, whole, generator=chance),
        positions=torch.randint(0, 2**31, whole, generator=chance),
        samples=torch.randint(0, 100, whole, generator=chance),
    )


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 1), (3, 7), (5, 1027), (9, 8193), (2, 99_999), (70, 300)]
)
def test_draws_from_whole_rows(rows: int, size: int, spread: float) -> None:
    chance = torch.Generator().manual_seed(size)
    logits = torch.randn(rows, size, generator=chance) * spread
    params = _draw_params(rows, chance)
    ids = torch.arange(size).expand(rows, -1)
    noise = gumbel_noise(params.seeds, params.positions, params.samples, ids)
    noisy = scale(logits, params.temperature) + noise
    found, wanted = native.sample(logits, params), noisy.argmax(dim=1)
    best = noisy.amax(dim=1)
    close = (noisy > best[:, None] - 1e-5).sum(dim=1) > 1
    assert torch.equal(found[~close], wanted[~close])
    assert (noisy.gather(1, found[:, None]).squeeze(1) >= best - 1e-5).all()
    assert close.sum() <= 1


@pytest.mark.usefixtures("way")
def test_draws_from_rows_with_values_that_are_no_numbers() -> None:
    chance = torch.Generator().manual_seed(1)
    logits, params = torch.randn(6, 3000, generator=chance), _draw_params(6, chance)
    logits[0] = float("-inf")
    logits[1, 10:] = float("-inf")
    logits[2, 2000] = float("inf")
    logits[3, 1500] = float("nan")
    logits[4, [7, 2500]] = float("inf")
    assert torch.equal(native.sample(logits, params), CPU.sample(logits, params))


@pytest.mark.usefixtures("way")
def test_some_rows_are_drawn_in_another_way() -> None:
    chance = torch.Generator().manual_seed(2)
    logits, params = torch.randn(5, 4000, generator=chance), _draw_params(5, chance)
    params.temperature[1] = 0
    params.top_k[3] = 5
    assert torch.equal(native.sample(logits, params), CPU.sample(logits, params))


# -- threads ----------------------------------------------------------------------------------------


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    _native.set_threads(3)
    try:
        packed, hidden = native.prepare_linear(torch.randn(200, 64)), torch.randn(9, 64)
        wanted = native.linear(hidden, packed, None)
        child = os.fork()
        if child == 0:
            same = torch.equal(native.linear(hidden, packed, None), wanted)
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(native.linear(hidden, packed, None), wanted)
    finally:
        _native.set_threads(1)


def test_threads_that_have_nothing_to_do_sleep() -> None:
    _native.set_threads(3)
    try:
        packed, hidden = native.prepare_linear(torch.randn(200, 64)), torch.randn(9, 64)
        native.linear(hidden, packed, None)
        before = time.process_time()
        time.sleep(0.5)
        used = time.process_time() - before
        assert used < 0.25, "two threads spinning all the while would use a second"
    finally:
        _native.set_threads(1)


def test_no_rows_at_all() -> None:
    empty = AttentionRows(begins([]), torch.tensor([], dtype=torch.long), torch.tensor([]), begins([]))
    cache = torch.zeros(2, 1, 4, 8)
    rows = native.prepare_attention(empty, cache)
    assert native.paged_attention(torch.zeros(0, 1, 8), cache, cache, rows, 1.0).shape == (0, 1, 8)
