"""Whether an idle Octavo holds nothing: every block free, nothing waiting or running."""

import asyncio
import time
from dataclasses import dataclass

from loadgen.grpc_client import GrpcClient
from octavo.v1 import generation_pb2 as pb

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Idle:
    """The last state that was seen."""

    problems: list[str]  # empty: idle, and every block is free
    pools: list[str]  # one line for each pool

    def text(self) -> str:
        verdict = "NOT IDLE" if self.problems else "idle, every block is free"
        return "\n".join([f"at the end: {verdict}", *self.pools, *self.problems])


async def wait_until_idle(client: GrpcClient, timeout: float) -> Idle:
    """Asks until nothing is held, for `timeout` seconds at most. Raises RequestError."""
    deadline = time.monotonic() + timeout
    while True:
        info = await client.server_info()
        state = Idle(problems(info), _pool_lines(info))
        if not state.problems or time.monotonic() >= deadline:
            return state
        await asyncio.sleep(_POLL_SECONDS)


def problems(info: pb.GetServerInfoReply) -> list[str]:
    """What a server holds that an idle one does not; empty when it is idle."""
    found = [
        f"{name}: {count} sequence groups"
        for name, count in (
            ("waiting", info.waiting),
            ("running", info.running),
            ("preempted", info.preempted),
        )
        if count
    ]
    if not info.gangs:
        found.append("no gang of workers is there, so no block was counted")
    for name, pool in _pools(info):
        found += _pool_problems(name, pool)
    return found


def _pool_problems(name: str, pool: pb.PoolInfo) -> list[str]:
    """What is wrong with an idle pool: used blocks, or counts that do not add up."""
    found = []
    if pool.used_blocks:
        found.append(f"{name}: {pool.used_blocks} blocks are still used")
    held = pool.free_blocks + pool.cached_blocks + pool.pinned_blocks
    if held + pool.used_blocks != pool.total_blocks:
        found.append(f"{name}: the counts do not add up to {pool.total_blocks} blocks")
    return found


def _pool_lines(info: pb.GetServerInfoReply) -> list[str]:
    return [
        f"{name}: {pool.free_blocks} free + {pool.cached_blocks} cached + {pool.pinned_blocks} pinned"
        f" + {pool.used_blocks} used, {pool.total_blocks} in total"
        for name, pool in _pools(info)
    ]


def _pools(info: pb.GetServerInfoReply) -> list[tuple[str, pb.PoolInfo]]:
    return [
        (f"gang {gang.gang} {kind} pool", pool)
        for gang in info.gangs
        for kind, pool in (("device", gang.device_pool), ("swap", gang.swap_pool))
    ]
