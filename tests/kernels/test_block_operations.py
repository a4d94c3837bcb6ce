import pytest
import torch

from octavo.kernels.table import CPU, REFERENCE, Kernels

BOTH = pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=["reference", "cpu"])


@BOTH
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


@BOTH
def test_kv_write_without_padding_takes_strided_input(kernels: Kernels) -> None:
    key_cache, value_cache = torch.zeros(3, 2, 4, 3), torch.zeros(3, 2, 4, 3)
    packed = torch.randn(2, 6, 3)
    prepared = kernels.prepare_kv_write(torch.tensor([5, 8]), key_cache)
    kernels.kv_write(packed[:, 2:4], packed[:, 4:], key_cache, value_cache, prepared)
    assert torch.equal(key_cache[1, :, 1], packed[0, 2:4])
    assert torch.equal(value_cache[2, :, 0], packed[1, 4:])
    assert int((key_cache != 0).sum()) == 12


@BOTH
def test_block_copy_reads_all_sources_first(kernels: Kernels) -> None:
    pools = [torch.randn(6, 2, 4, 3), torch.randn(6, 2, 4, 3)]
    clones = [pool.clone() for pool in pools]
    # 1 -> 2 -> 3 is a chain: block 3 gets what block 2 held before.
    kernels.block_copy(pools, torch.tensor([1, 2, 5]), torch.tensor([2, 3, 0]))
    for pool, clone in zip(pools, clones, strict=True):
        assert torch.equal(pool, clone[[5, 1, 1, 2, 4, 5]])


@BOTH
def test_block_swap_moves_out_and_back_elsewhere(kernels: Kernels) -> None:
    device, swap = [torch.randn(6, 2, 4, 3)], [torch.zeros(3, 2, 4, 3)]
    clone = device[0].clone()
    kernels.block_swap(device, swap, torch.tensor([4, 1]), torch.tensor([0, 2]))
    assert torch.equal(device[0], clone)
    assert torch.equal(swap[0][[0, 2]], clone[[4, 1]])
    assert not swap[0][1].any()
    kernels.block_swap(swap, device, torch.tensor([2, 0]), torch.tensor([5, 3]))
    assert torch.equal(device[0], clone[[0, 1, 2, 4, 4, 1]])


@BOTH
def test_no_pairs_change_nothing(kernels: Kernels) -> None:
    pool = torch.randn(2, 1, 4, 3)
    clone, none = pool.clone(), torch.zeros(0, dtype=torch.int64)
    kernels.block_copy([pool], none, none)
    kernels.block_swap([pool], [pool], none, none)
    assert torch.equal(pool, clone)
