import torch

from octavo.dataplane.engines.swap_lane import SwapLane
from octavo.kernels.table import CPU
from octavo.proto.wire import int32s


def test_blocks_of_all_pools_go_and_come_back_to_other_places() -> None:
    pools = [torch.randn(9, 2, 4, 8) for _ in range(6)]
    before = [pool.clone() for pool in pools]
    lane = SwapLane(pools, 5, CPU)
    lane.swap_out(int32s([7, 3, 2, 0, 8, 4]))
    for pool in pools:
        pool[[7, 2, 8]] = float("nan")  # given to others meanwhile
    lane.swap_in(int32s([3, 1, 4, 6, 0, 2]))
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool[[1, 6, 2]], old[[7, 8, 2]])
        untouched = [0, 3, 4, 5]
        assert torch.equal(pool[untouched], old[untouched])
