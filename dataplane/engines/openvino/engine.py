"""Runs a model as a graph of OpenVINO on CPUs."""

from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
import torch
from torch import Tensor

from octavo.common.modelfiles import ModelFiles
from octavo.dataplane.engine import Batch, EngineError, EngineInfo, Ints
from octavo.dataplane.engines.openvino.adapter import (
    BLOCK_SIZE,
    KV_FORMATS,
    compile_model,
    require_usable,
)
from octavo.dataplane.engines.openvino.graph import FIRST_CACHE, body_of, head_of
from octavo.dataplane.engines.openvino.operations import GRAPH
from octavo.dataplane.engines.openvino.pools import Pools
from octavo.dataplane.loading.weights import open_weights
from octavo.dataplane.memory import require_memory
from octavo.dataplane.models.layers import Linear
from octavo.dataplane.models.registry import family_of
from octavo.dataplane.models.shard import ALONE


class OpenVinoEngine:
    """Implements `octavo.dataplane.engine.Engine`."""

    def __init__(
        self,
        files: ModelFiles,
        packing: str,
        kv_dtype: str,
        threads: int,
        round_activations: bool = False,
    ) -> None:
        """Loads the weights and compiles the graphs.

        Args:
            packing: of the weights, as `open_weights` takes it.
            kv_dtype: of the caches, one of `KV_FORMATS`.
            round_activations: whether what meets small integers becomes int8.

        Raises:
            ModelError: the model cannot be used.
            UnusableError: this version of OpenVINO cannot.
        """
        require_usable()
        model = family_of(files)(files, open_weights(files, torch.float32, packing), GRAPH, ALONE)
        self._weight_bytes = model.weight_bytes()
        for module in model.modules():
            if isinstance(module, Linear):
                module.prepare()
        self._config, self._format = model.config, KV_FORMATS[kv_dtype]
        compiled = [
            compile_model(graph, self._format, threads, round_activations)
            for graph in (body_of(model), head_of(model))
        ]
        self._body, self._head = compiled[0], compiled[1].create_infer_request()
        self._pools = self._swap = self._make(0)
        self._request = self._bind(self._pools)

    @property
    def overlaps(self) -> bool:
        return False

    def warm_up(self, num_slots: int) -> None:
        """Graphs were compiled when the engine was made."""

    def synchronize(self) -> None:
        """Every call has waited already."""

    def describe(self) -> EngineInfo:
        block_bytes = sum(int(np.prod(shape)) for shape in self._block_shapes())
        block_bytes *= np.dtype(self._format.element).itemsize * self._config.num_layers
        return EngineInfo(
            device="cpu",
            engine="openvino",
            block_sizes=(BLOCK_SIZE,),
            preferred_block_size=BLOCK_SIZE,
            token_bytes=-(-block_bytes // BLOCK_SIZE),
            weight_bytes=self._weight_bytes,
        )

    def make_pools(self, num_blocks: int, block_size: int, num_cpu_blocks: int) -> None:
        if block_size != BLOCK_SIZE:
            raise EngineError(
                f"--block-size {block_size} is not supported by the OpenVINO engine, only {BLOCK_SIZE}"
            )
        self._pools = self._swap = self._make(0)  # the old ones go before the new ones come
        self._request = self._bind(self._pools)
        require_memory((num_blocks + num_cpu_blocks) * block_size * self.describe().token_bytes)
        try:
            self._pools, self._swap = self._make(num_blocks), self._make(num_cpu_blocks)
        except MemoryError as error:
            raise EngineError(
                f"no memory for {num_blocks} device and {num_cpu_blocks} swap blocks: "
                "lower --num-kv-blocks, --kv-memory or --swap-memory"
            ) from error
        self._request = self._bind(self._pools)

    def _make(self, num_blocks: int) -> Pools:
        layers = self._config.num_layers
        return Pools.make(layers, num_blocks, *self._block_shapes(), self._format.element)

    def _block_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a block of keys and of one of values."""
        heads = self._config.num_kv_heads, self._config.head_dim
        return self._format.key_shape(*heads), self._format.value_shape(*heads)

    def _bind(self, pools: Pools) -> ov.InferRequest:
        """A request that works on the blocks of `pools` in place."""
        request = self._body.create_infer_request()
        for index, layer in enumerate((*pools.keys, *pools.values), start=FIRST_CACHE):
            request.set_input_tensor(index, _shared(layer))
        return request

    def forward(self, batch: Batch) -> Tensor:
        longest = batch.context_lens + np.diff(batch.query_begins)
        inputs = (
            batch.token_ids,
            batch.positions,
            batch.logit_tokens,
            batch.context_lens,
            batch.query_begins,
            batch.block_indices,
            batch.block_begins,
            longest.max(initial=0),
        )
        return _run(self._request, inputs, (len(batch.logit_tokens), self._config.hidden_size))

    def logits(self, hidden: Tensor) -> Tensor:
        return _run(self._head, (hidden.numpy(),), (len(hidden), self._config.vocab_size))

    def copy_blocks(self, pairs: Ints) -> None:
        self._pools.copy(pairs)

    def swap_out(self, pairs: Ints) -> None:
        self._swap.copy_from(self._pools, pairs)

    def swap_in(self, pairs: Ints) -> None:
        self._pools.copy_from(self._swap, pairs)


def _run(request: ov.InferRequest, inputs: tuple[Any, ...], shape: tuple[int, int]) -> Tensor:
    """The first output, which has that shape, in memory of its own."""
    for index, values in enumerate(inputs):
        request.set_input_tensor(index, _shared(np.asarray(values, order="C")))
    output = torch.empty(shape)
    request.set_output_tensor(0, _shared(output.numpy()))
    request.infer(share_inputs=True, share_outputs=True)
    return output


def _shared(array: npt.NDArray[Any]) -> ov.Tensor:
    """The memory of an array, which must outlive the run."""
    return ov.Tensor(array, shared_memory=True)
