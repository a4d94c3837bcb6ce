"""The torch engine: the reference on CPUs, and what runs on GPUs."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.common.modelfiles import ModelFiles
from octavo.dataplane.engine import Batch, EngineError, EngineInfo, Ints
from octavo.dataplane.loading.weights import open_weights
from octavo.dataplane.memory import available_memory
from octavo.dataplane.models.layers import ForwardState, Linear
from octavo.dataplane.models.registry import family_of
from octavo.kernels.rows import AttentionRows
from octavo.kernels.table import kernels_for

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

    def __init__(self, files: ModelFiles, device: str, dtype: str) -> None:
        """Loads the weights. Raises ModelError."""
        self._device, self._dtype = torch.device(device), DTYPES[dtype]
        self._kernels = kernels_for(self._device.type)
        define = family_of(files)
        self._model = define(files, open_weights(files, self._dtype), self._kernels).to(self._device)
        for module in self._model.modules():
            if isinstance(module, Linear):
                module.prepare()
        self._pools = self._swap = Pools([], [])

    @property
    def overlaps(self) -> bool:
        return self._device.type != "cpu"

    def describe(self) -> EngineInfo:
        config = self._model.config
        return EngineInfo(
            device=str(self._device),
            engine="torch",
            block_sizes=(),
            preferred_block_size=PREFERRED_BLOCK_SIZE,
            token_bytes=2
            * config.num_layers
            * config.num_kv_heads
            * config.head_dim
            * self._dtype.itemsize,
        )

    def make_pools(self, num_blocks: int, block_size: int, num_cpu_blocks: int) -> None:
        self._pools = self._swap = Pools([], [])  # the old ones go before the new ones come
        token_bytes = self.describe().token_bytes
        on_cpu = num_cpu_blocks + (num_blocks if self._device.type == "cpu" else 0)
        _check_memory(on_cpu * block_size * token_bytes)
        try:
            self._pools = self._make(num_blocks, block_size, self._device)
            self._swap = self._make(num_cpu_blocks, block_size, torch.device("cpu"))
        except RuntimeError as error:  # torch's out of memory, on either device
            raise EngineError(
                f"no memory for {num_blocks} device and {num_cpu_blocks} swap blocks of {block_size} "
                "tokens: lower --num-kv-blocks, --kv-memory or --swap-memory"
            ) from error

    def _make(self, num_blocks: int, block_size: int, device: torch.device) -> Pools:
        config = self._model.config
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)

        def one() -> list[Tensor]:
            # Not zeroed: the system commits memory as blocks are first written. What is there before
            # is never part of a result, since attention masks what it loads.
            return [
                torch.empty(shape, dtype=self._dtype, device=device) for _ in range(config.num_layers)
            ]

        return Pools(one(), one())

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        model, key_cache = self._model, self._pools.keys[0]
        rows = AttentionRows(
            query_begins=self._tensor(batch.query_begins),
            context_lens=self._tensor(batch.context_lens),
            block_indices=self._tensor(batch.block_indices),
            block_begins=self._tensor(batch.block_begins),
        )
        state = ForwardState(
            rotations=model.rotations[self._tensor(batch.positions)].to(self._dtype),
            rows=self._kernels.prepare_attention(rows, key_cache),
            kv_slots=self._kernels.prepare_kv_write(self._tensor(batch.kv_slots), key_cache),
            key_caches=self._pools.keys,
            value_caches=self._pools.values,
        )
        hidden: Tensor = model(self._token_ids(batch), state, self._tensor(batch.logit_tokens))
        return hidden

    def _token_ids(self, batch: Batch) -> Tensor:
        ids = self._tensor(batch.token_ids)
        if batch.late_tokens is not None and batch.late_values is not None:
            ids[self._tensor(batch.late_tokens)] = batch.late_values
        return ids

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
        self._move(self._pools, self._swap, pairs)

    @torch.inference_mode()
    def swap_in(self, pairs: Ints) -> None:
        self._move(self._swap, self._pools, pairs)

    def _move(self, source: Pools, destination: Pools, pairs: Ints) -> None:
        ids = self._tensor(pairs)
        self._kernels.block_swap(source.all(), destination.all(), ids[0::2], ids[1::2])

    def _tensor(self, values: Ints) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _check_memory(needed: int) -> None:
    available = available_memory()
    if needed > available:
        raise EngineError(
            f"the KV pools need {needed >> 20} MiB and {available >> 20} MiB are available: "
            "lower --num-kv-blocks, --kv-memory or --swap-memory"
        )
