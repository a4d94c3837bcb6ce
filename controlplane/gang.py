"""A gang: the worker ranks that run one plan together, and what they can hold."""

import logging
import time
from dataclasses import dataclass, field

from octavo.controlplane.draft import Shape
from octavo.controlplane.options import ControlPlaneOptions
from octavo.controlplane.preemption import Speeds
from octavo.controlplane.scheduler import Scheduler
from octavo.proto.session import GangState, Register, Reset, control_identity, data_identity

log = logging.getLogger(__name__)


class RankRefused(Exception):  # noqa: N818 (an answer to the worker)
    """A worker that cannot take part; the text goes to it and says what to do."""


@dataclass
class Rank:
    """One registered worker."""

    register: Register
    last_seen: float = field(default_factory=time.monotonic)

    @property
    def control(self) -> bytes:
        return control_identity(self.register.incarnation)

    @property
    def data(self) -> bytes:
        return data_identity(self.register.incarnation)


@dataclass
class Gang:
    """The state of one gang; its scheduler outlives its ranks."""

    number: int
    epoch: int  # goes up with every change of the gang; larger than any earlier control plane's
    rank: Rank | None = None
    ready: bool = False  # the rank has acknowledged the reset of this epoch
    scheduler: Scheduler | None = None
    plan_sent_at: list[float] = field(default_factory=list)  # monotonic seconds, of plans in flight
    faults_in_a_row: int = 0

    def reset_message(self, controlplane: int) -> Reset:
        """What tells a rank to forget everything and join this epoch."""
        assert self.scheduler is not None
        shape = self.scheduler.shape
        return Reset(
            controlplane=controlplane,
            epoch=self.epoch,
            gang=self.number,
            rank=0,
            gang_size=1,
            rendezvous="",
            block_size=shape.block_size,
            num_slots=shape.num_slots,
            max_batched_tokens=shape.max_batched_tokens,
            max_model_len=shape.max_model_len,
            num_blocks=shape.num_blocks,
            num_cpu_blocks=shape.num_cpu_blocks,
        )

    def state(self) -> GangState:
        """For operators."""
        register = self.rank.register if self.rank else None
        state = GangState(
            gang=self.number,
            size=1,
            epoch=self.epoch,
            ready=self.ready,
            device=register.device if register else "",
            engine=register.engine if register else "",
        )
        if self.scheduler is not None:
            state.block_size = self.scheduler.shape.block_size
            state.device_pool = self.scheduler.blocks.device.state()
            state.swap_pool = self.scheduler.blocks.swap.state()
            state.plans = self.scheduler.next_number
            state.running = len(self.scheduler.running)
        return state


def shape_of(register: Register, options: ControlPlaneOptions, epoch: int) -> Shape:
    """What a gang of this worker can hold. Raises RankRefused."""
    block_size = _block_size(register, options)
    block_bytes = block_size * register.token_bytes
    num_blocks = register.num_kv_blocks
    if num_blocks is None:
        num_blocks = register.kv_bytes // max(block_bytes, 1)
    num_cpu_blocks = register.swap_blocks
    if num_cpu_blocks is None:
        num_cpu_blocks = register.swap_bytes // max(block_bytes, 1)
    return Shape(
        epoch=epoch,
        block_size=block_size,
        num_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        num_slots=options.max_num_seqs,
        max_model_len=_max_model_len(register, options, num_blocks * block_size),
        max_batched_tokens=options.max_num_batched_tokens,
        prefill_chunk=options.prefill_chunk or options.max_num_batched_tokens,
        watermark=options.watermark,
        block_bytes=block_bytes,
        preemption=options.preemption,
        prefix_caching=options.prefix_caching,
    )


def speeds_of(register: Register, block_size: int) -> Speeds:
    """What the worker measured when it started, in blocks and tokens."""
    return Speeds(
        copy=register.copy_bandwidth / max(block_size * register.token_bytes, 1),
        prefill=register.prefill_speed,
    )


def _block_size(register: Register, options: ControlPlaneOptions) -> int:
    wanted = options.block_size or register.preferred_block_size
    supported = register.block_sizes.tolist()
    if supported and wanted not in supported:
        raise RankRefused(
            f"--block-size {wanted} is not supported by the {register.engine} engine on "
            f"{register.device}, which takes {', '.join(map(str, supported))}: start the worker "
            f"with --block-size {wanted} too, or with --engine torch, which takes any"
        )
    return wanted


def _max_model_len(register: Register, options: ControlPlaneOptions, capacity: int) -> int:
    """Tokens that one sequence may have; `capacity` is what the KV pool holds."""
    of_model, wanted = register.model.max_model_len, options.max_model_len
    if wanted is not None and wanted > of_model:
        raise RankRefused(
            f"--max-model-len {wanted} exceeds the {of_model} positions of {register.model.name}"
        )
    longest = wanted or of_model
    advice = "raise --num-kv-blocks or --kv-memory"
    if capacity < 1:
        raise RankRefused(f"the KV pool is too small for one sequence: it has no block; {advice}")
    if wanted is not None and capacity < wanted:
        raise RankRefused(
            f"the KV pool is too small for one sequence: it holds {capacity} tokens, --max-model-len "
            f"asks for {wanted}; {advice}, or lower --max-model-len"
        )
    if capacity < longest:
        log.warning(
            "the KV pool holds %d tokens, less than the model's %d: longer sequences are refused or "
            "stop there; %s",
            capacity,
            longest,
            advice,
        )
    return min(longest, capacity)
