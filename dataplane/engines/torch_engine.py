"""The torch engine: the reference on CPUs, and what runs on GPUs."""

import logging
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.common.modelfiles import ModelFiles
from octavo.dataplane.engine import Batch, EngineError, EngineInfo, Ints
from octavo.dataplane.engines.decode_graphs import DecodeGraphs, Inputs, rehearsals, takes_all
from octavo.dataplane.engines.recorded_layers import Layers, record_layers
from octavo.dataplane.engines.swap_lane import SwapLane
from octavo.dataplane.loading.weights import open_weights
from octavo.dataplane.memory import require_memory
from octavo.dataplane.models.layers import ForwardState, Linear
from octavo.dataplane.models.registry import family_of
from octavo.dataplane.models.shard import ALONE, Collectives
from octavo.kernels.rows import AttentionRows, KvScales
from octavo.kernels.table import Kernels, kernels_for

log = logging.getLogger(__name__)

PREFERRED_BLOCK_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Pools:
    """Keys and values of all layers, each ``[num_blocks, num_kv_heads, block_size, head_dim]``."""

    keys: list[Tensor]
    values: list[Tensor]

    def all(self) -> list[Tensor]:
        return self.keys + self.values


class TorchEngine:
    """Implements `octavo.dataplane.engine.Engine`."""

    def __init__(
        self,
        files: ModelFiles,
        device: str,
        dtype: str,
        kernels: Kernels | None = None,
        kv_fp8: bool = False,
        collectives: Collectives = ALONE,
        packing: str = "none",
    ) -> None:
        """Loads the weights; without `kernels` the device's own are taken. Raises ModelError.

        Args:
            packing: of the weights, as `open_weights` takes it; only native kernels know integers.
            kv_fp8: whether the KV cache is float8 (e4m3) in place of `dtype`.
            collectives: of the gang; they say which part of the model this rank has.
        """
        self._device, self._dtype = torch.device(device), DTYPES[dtype]
        self._overlaps = self._device.type != "cpu"
        self._kernels = kernels or kernels_for(self._device.type)
        define = family_of(files)
        weights = open_weights(files, self._dtype, packing)
        self._model = define(files, weights, self._kernels, collectives).to(self._device)
        self._num_kv_heads = len(self._model.split.kv_heads)
        self._weight_bytes = self._model.weight_bytes()
        self._rotations = [table.to(self._dtype) for table in self._model.rotations]
        for module in self._model.modules():
            if isinstance(module, Linear):
                module.prepare()
        self._kv_dtype = torch.float8_e4m3fn if kv_fp8 else self._dtype
        self._kv_scales = self._unscaled() if kv_fp8 else None
        self._pools = Pools([], [])
        self._swap: SwapLane | None = None
        self._graphs: DecodeGraphs | None = None
        self._layers: Layers = self._model.body

    def _unscaled(self) -> KvScales:
        """Factors of 1: keys and values are far within the +-448 that float8 holds."""
        ones = torch.ones(self._num_kv_heads, device=self._device)
        return KvScales(ones, ones)

    @property
    def overlaps(self) -> bool:
        return self._overlaps

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def describe(self) -> EngineInfo:
        config = self._model.config
        return EngineInfo(
            device=str(self._device),
            engine="torch",
            block_sizes=(),
            preferred_block_size=PREFERRED_BLOCK_SIZE,
            token_bytes=2
            * config.num_layers
            * self._num_kv_heads
            * config.head_dim
            * self._kv_dtype.itemsize,
            weight_bytes=self._weight_bytes,
        )

    def make_pools(self, num_blocks: int, block_size: int, num_cpu_blocks: int) -> None:
        self.synchronize()
        self._graphs = self._swap = None
        self._layers = self._model.body  # what was recorded holds the old pools
        self._pools = Pools([], [])  # the old ones go before the new ones come
        token_bytes = self.describe().token_bytes
        on_cpu = num_cpu_blocks + (num_blocks if self._device.type == "cpu" else 0)
        require_memory(on_cpu * block_size * token_bytes)
        try:
            self._pools = self._make(num_blocks, block_size)
            self._swap = SwapLane(self._pools.all(), num_cpu_blocks, self._kernels)
        except RuntimeError as error:  # torch's out of memory, on either device
            raise EngineError(
                f"no memory for {num_blocks} device and {num_cpu_blocks} swap blocks of {block_size} "
                "tokens: lower --num-kv-blocks, --kv-memory or --swap-memory"
            ) from error

    def _make(self, num_blocks: int, block_size: int) -> Pools:
        config = self._model.config
        shape = (num_blocks, self._num_kv_heads, block_size, config.head_dim)
        # Not zeroed: the system commits memory as blocks are first written. What is there before is
        # never part of a result, since attention masks what it loads.
        empty = partial(torch.empty, shape, dtype=self._kv_dtype, device=self._device)
        keys, values = ([empty() for _ in range(config.num_layers)] for _ in range(2))
        return Pools(keys, values)

    @torch.inference_mode()
    def warm_up(self, num_slots: int) -> None:
        record, alone = self._kernels.record, self._model.split.collectives.shard.size == 1
        if self._device.type == "cuda":
            self._warm_up_gpu(num_slots)
        elif record is not None and self._kv_dtype is torch.float32 and alone:
            self._layers = record_layers(self._model.body, record, self._enter, self._pools.keys[0])

    def _warm_up_gpu(self, num_slots: int) -> None:
        begin, block_size = time.perf_counter(), self._pools.keys[0].shape[2]
        for batch in rehearsals(block_size, min(1024, self._model.config.max_positions - 8)):
            self.logits(self.forward(batch))
        for pairs in range(1, min(10, len(self._pools.keys[0])), 8):  # few and many copies
            self.copy_blocks(np.array([[0, 1 + n] for n in range(pairs)], dtype=np.int32).ravel())
        if self._model.split.collectives.shard.size == 1:  # collectives are not captured
            self._graphs = DecodeGraphs(self._compute, self._device, block_size, num_slots)
        self.synchronize()
        what = "warmed up" if self._graphs is None else "warmed up and captured decode steps"
        log.info("%s in %.1f s", what, time.perf_counter() - begin)

    def drop_graphs(self) -> None:
        """From now on every forward is launched kernel by kernel."""
        self._graphs, self._layers = None, self._model.body

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        hidden = self._graphs.run(batch) if self._graphs is not None else None
        return self._compute(self._inputs(batch), takes_all(batch)) if hidden is None else hidden

    def _enter(self, batch: Batch) -> tuple[Tensor, ForwardState]:
        inputs = self._inputs(batch)
        state = self._state(inputs)
        return self._model.embed(inputs.token_ids, state), state

    def _inputs(self, batch: Batch) -> Inputs:
        token_ids = self._tensor(batch.token_ids)
        if batch.late_tokens is not None and batch.late_values is not None:
            token_ids[self._tensor(batch.late_tokens)] = batch.late_values
        rows = AttentionRows(
            query_begins=self._tensor(batch.query_begins),
            context_lens=self._tensor(batch.context_lens),
            block_indices=self._tensor(batch.block_indices),
            block_begins=self._tensor(batch.block_begins),
        )
        return Inputs(
            token_ids=token_ids,
            positions=self._tensor(batch.positions),
            kv_slots=self._tensor(batch.kv_slots),
            logit_tokens=self._tensor(batch.logit_tokens),
            rows=rows,
        )

    def _compute(self, inputs: Inputs, takes_all: bool = False) -> Tensor:
        """
        Args:
            takes_all: whether the logits of all tokens are wanted, in their order.
        """
        state = self._state(inputs)
        parts = self._layers(self._model.embed(inputs.token_ids, state), state)
        if not takes_all:
            parts = tuple(part[inputs.logit_tokens] for part in parts)
        return self._model.finish(*parts)

    def _state(self, inputs: Inputs) -> ForwardState:
        key_cache, positions = self._pools.keys[0], inputs.positions
        return ForwardState(
            positions=positions,
            rotations=[table.index_select(0, positions) for table in self._rotations],
            rows=self._kernels.prepare_attention(inputs.rows, key_cache),
            kv_slots=self._kernels.prepare_kv_write(inputs.kv_slots, key_cache),
            key_caches=self._pools.keys,
            value_caches=self._pools.values,
            kv_scales=self._kv_scales,
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    @torch.inference_mode()
    def copy_blocks(self, pairs: Ints) -> None:
        self._kernels.block_copy(
            self._pools.all(), self._tensor(pairs[0::2]), self._tensor(pairs[1::2])
        )

    @torch.inference_mode()
    def swap_out(self, pairs: Ints) -> None:
        assert self._swap is not None, "there are no pools yet"
        self._swap.swap_out(pairs)

    @torch.inference_mode()
    def swap_in(self, pairs: Ints) -> None:
        assert self._swap is not None, "there are no pools yet"
        self._swap.swap_in(pairs)

    def _tensor(self, values: Ints) -> Tensor:
        tensor = torch.from_numpy(values.astype(np.int64))
        return tensor if self._device.type == "cpu" else tensor.to(self._device)
