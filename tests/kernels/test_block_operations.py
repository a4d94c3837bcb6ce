import pytest
import torch

from octavo.kernels.reference.rotary import inverse_frequencies, rotary, rotary_table
from octavo.kernels.rows import KvScales
from octavo.kernels.table import CPU, REFERENCE, Kernels, kernels_named

NATIVE = kernels_named("native", "cpu")
TRITON = kernels_named("triton", "cpu")
ALL = pytest.mark.parametrize(
    "kernels", [REFERENCE, CPU, NATIVE, TRITON], ids=["reference", "cpu", "native", "triton"]
)


@ALL
def test_kv_write_touches_only_its_slots(kernels: Kernels) -> None:
    key_cache, value_cache = torch.randn(5, 2, 4, 3), torch.randn(5, 2, 4, 3)
    wanted = key_cache.clone(), value_cache.clone()
    keys, values = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    slots = [7, -1, 0, 19, -1]
    for token, slot in enumerate(slots):
        if slot >= 0:
            wanted[0][slot // 4, :, slot % 4] = keys[token]
            wanted[1][slot // 4, :, slot % 4] = values[token]
    prepared = kernels.prepare_kv_write(torch.tensor(slots), key_cache)
    kernels.kv_write(keys, values, key_cache, value_cache, prepared)
    assert torch.equal(key_cache, wanted[0])
    assert torch.equal(value_cache, wanted[1])


@ALL
def test_kv_write_without_padding_takes_strided_input(kernels: Kernels) -> None:
    key_cache, value_cache = torch.zeros(3, 2, 4, 3), torch.zeros(3, 2, 4, 3)
    packed = torch.randn(2, 6, 3)
    prepared = kernels.prepare_kv_write(torch.tensor([5, 8]), key_cache)
    kernels.kv_write(packed[:, 2:4], packed[:, 4:], key_cache, value_cache, prepared)
    assert torch.equal(key_cache[1, :, 1], packed[0, 2:4])
    assert torch.equal(value_cache[2, :, 0], packed[1, 4:])
    assert int((key_cache != 0).sum()) == 12


@ALL
def test_block_copy_reads_all_sources_first(kernels: Kernels) -> None:
    pools = [torch.randn(6, 2, 4, 3), torch.randn(6, 2, 4, 3)]
    clones = [pool.clone() for pool in pools]
    # 1 -> 2 -> 3 is a chain: block 3 gets what block 2 held before.
    kernels.block_copy(pools, torch.tensor([1, 2, 5]), torch.tensor([2, 3, 0]))
    for pool, clone in zip(pools, clones, strict=True):
        assert torch.equal(pool, clone[[5, 1, 1, 2, 4, 5]])


@ALL
def test_block_swap_moves_out_and_back_elsewhere(kernels: Kernels) -> None:
    device, swap = [torch.randn(6, 2, 4, 3)], [torch.zeros(3, 2, 4, 3)]
    clone = device[0].clone()
    kernels.block_swap(device, swap, torch.tensor([4, 1]), torch.tensor([0, 2]))
    assert torch.equal(device[0], clone)
    assert torch.equal(swap[0][[0, 2]], clone[[4, 1]])
    assert not swap[0][1].any()
    kernels.block_swap(swap, device, torch.tensor([2, 0]), torch.tensor([5, 3]))
    assert torch.equal(device[0], clone[[0, 1, 2, 4, 4, 1]])


@ALL
def test_no_pairs_change_nothing(kernels: Kernels) -> None:
    pool = torch.randn(2, 1, 4, 3)
    clone, none = pool.clone(), torch.zeros(0, dtype=torch.int64)
    kernels.block_copy([pool], none, none)
    kernels.block_swap([pool], [pool], none, none)
    kernels.block_scatter(kernels.block_gather([pool], none), [pool], none)
    assert torch.equal(pool, clone)


@ALL
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_blocks_of_all_pools_gather_into_one_piece_and_scatter_again(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    pools = [torch.randn(7, 2, 16, 48).to(dtype) for _ in range(4)]
    clones = [pool.clone() for pool in pools]
    blocks = torch.tensor([6, 0, 3])
    staging = kernels.block_gather(pools, blocks)
    assert staging.shape == (3, 4, 2, 16, 48)
    assert staging.is_contiguous()
    for index, clone in enumerate(clones):
        assert torch.equal(staging[:, index], clone[blocks])
    kernels.block_scatter(staging, pools, torch.tensor([1, 6, 4]))
    for pool, clone in zip(pools, clones, strict=True):
        assert torch.equal(pool, clone[[0, 6, 2, 3, 3, 5, 0]])


@pytest.mark.parametrize("pairs", [1, 3, 64, 70])  # one launch, and through a staging buffer
def test_triton_copies_any_number_of_pairs(pairs: int) -> None:
    wide = torch.randn(150, 2 * 16 * 40 + 20)
    pools = [torch.randn(150, 2, 16, 40), wide.as_strided((150, 2, 16, 40), (1300, 640, 40, 1))]
    clones = [pool.clone() for pool in pools]
    order = torch.randperm(150, generator=torch.Generator().manual_seed(pairs))
    sources, destinations = order[:pairs], order[-pairs:]
    TRITON.block_copy(pools, sources, destinations)
    for pool, clone in zip(pools, clones, strict=True):
        clone[destinations] = clone[sources]
        assert torch.equal(pool, clone)


def test_triton_refuses_pools_that_one_table_cannot_describe() -> None:
    one = torch.tensor([0])
    for pools, fault in (
        ([torch.zeros(2, 4), torch.zeros(2, 8)], "differ"),
        ([torch.zeros(2, 4, 4).transpose(1, 2)], "in one piece"),
        ([torch.zeros(2, 3, dtype=torch.float16)], "whole words"),
    ):
        with pytest.raises(ValueError, match=fault):
            TRITON.block_gather(pools, one)


E4M3 = torch.float8_e4m3fn


@ALL
def test_fp8_writes_round_and_saturate_as_torch_does(kernels: Kernels) -> None:
    """Every border between two e4m3 numbers, a little to either side, and far beyond the largest."""
    bits = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()  # 0 .. 448
    middles = (bits[1:] + bits[:-1]) / 2
    around = [bits, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), torch.tensor([464.0, 1e6])]
    values = torch.cat((*around, -torch.cat(around)))
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(-1, 1, 64)
    scales = KvScales(torch.tensor([0.5]), torch.tensor([4.0]))
    num_blocks = -(-len(values) // 4)
    caches = [torch.zeros(num_blocks, 1, 4, 64).to(E4M3) for _ in range(2)]
    slots = torch.arange(len(values))
    prepared = kernels.prepare_kv_write(slots, caches[0])
    kernels.kv_write(values * 0.5, values * 4.0, *caches, prepared, scales)
    for cache in caches:
        found = cache.view(-1, 64)[: len(values)]
        assert torch.equal(
            found.view(torch.uint8), values.flatten(1).clamp(-448, 448).to(E4M3).view(torch.uint8)
        )


@ALL
@pytest.mark.parametrize("fp8", [False, True])
def test_rotating_and_writing_at_once_equals_the_two_apart(kernels: Kernels, fp8: bool) -> None:
    chance = torch.Generator().manual_seed(3)
    heads = torch.randn(5, 6 + 2 * 2, 24, generator=chance)
    rotations = rotary_table(inverse_frequencies(24, 10_000.0), 50)[torch.tensor([0, 3, 17, 18, 49])]
    slots = torch.tensor([9, -1, 0, 14, 5])
    scales = KvScales(torch.tensor([0.01, 0.3]), torch.tensor([2.0, 0.02])) if fp8 else None
    dtype = E4M3 if fp8 else torch.float32
    found, wanted = ([torch.zeros(4, 2, 4, 24).to(dtype) for _ in range(2)] for _ in range(2))
    prepared = kernels.prepare_kv_write(slots, found[0])
    query = kernels.rotary_kv_write(heads, rotations, *found, prepared, scales)
    rotated = rotary(heads, rotations)
    REFERENCE.kv_write(rotated[:, 6:8], heads[:, 8:], *wanted, slots, scales)
    torch.testing.assert_close(query, rotated[:, :6], rtol=1e-6, atol=1e-6)
    for cache, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(cache.float(), other.float(), rtol=0.13 if fp8 else 1e-6, atol=1e-6)
