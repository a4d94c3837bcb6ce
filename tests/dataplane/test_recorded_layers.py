"""The torch engine's layers as one call: recorded when it warms up, and only where that is the same."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from forwards import SIZE, batch_of_rows
from tiny_llama import prompt_of
from torch import Tensor

from octavo.common.modelfiles import open_model
from octavo.dataplane.engine import Batch
from octavo.dataplane.engines.recorded_layers import RecordedLayers, record_layers
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.dataplane.models.layers import ForwardState
from octavo.kernels.table import CPU


def engine_with_pools(folder: Path, packing: str = "none", dtype: str = "float32") -> TorchEngine:
    engine = TorchEngine(open_model(str(folder)), "cpu", dtype, packing=packing)
    engine.make_pools(6, SIZE, 0)
    return engine


def batch_of(tokens: int) -> Batch:
    return batch_of_rows([(prompt_of(tokens), 0, [4, 1, 5])], [tokens - 1])


def try_to_record(engine: TorchEngine, layers: "Changed") -> bool:
    record = engine._kernels.record
    assert record is not None
    with torch.inference_mode():
        return record_layers(layers, record, engine._enter, engine._pools.keys[0]) is not layers


@pytest.mark.parametrize("packing", ["none", "int8"])
def test_sizes_may_change_between_forwards(model_folder: Path, packing: str) -> None:
    engine = engine_with_pools(model_folder, packing)
    sizes = (1, 90, 3, 64)
    wanted = [engine.forward(batch_of(tokens)) for tokens in sizes]
    engine.warm_up(2)
    assert isinstance(engine._layers, RecordedLayers)
    for tokens, hidden in zip(sizes, wanted, strict=True):
        assert torch.equal(engine.forward(batch_of(tokens)), hidden)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 16), (9, 1), (7, 3)])
def test_new_pools_are_recorded_anew(model_folder: Path, num_blocks: int, block_size: int) -> None:
    engine = engine_with_pools(model_folder)
    engine.warm_up(2)
    old = engine._pools.keys[0]
    before = old.clone()
    engine.make_pools(num_blocks, block_size, 0)
    assert not isinstance(engine._layers, RecordedLayers)
    engine.warm_up(2)
    assert isinstance(engine._layers, RecordedLayers)
    assert torch.equal(old.view(torch.int32), before.view(torch.int32))


def test_small_pools_are_no_hindrance(model_folder: Path) -> None:
    engine = engine_with_pools(model_folder)
    engine.make_pools(1, 2, 0)
    engine.warm_up(1)
    assert isinstance(engine._layers, RecordedLayers)


def test_other_types_and_kernels_run_operation_by_operation(model_folder: Path) -> None:
    files = open_model(str(model_folder))
    for engine in (
        TorchEngine(files, "cpu", "bfloat16"),
        TorchEngine(files, "cpu", "float32", CPU),
        TorchEngine(files, "cpu", "float32", kv_fp8=True),
    ):
        engine.make_pools(6, SIZE, 0)
        engine.warm_up(2)
        assert not isinstance(engine._layers, RecordedLayers)
        assert np.isfinite(engine.forward(batch_of(9)).float().numpy()).all()


class Changed:
    """An engine's layers, beside which torch computes as well."""

    def __init__(self, engine: TorchEngine, what: str) -> None:
        self._body, self._what = engine._model.body, what

    def __call__(self, hidden: Tensor, state: ForwardState) -> tuple[Tensor, ...]:
        if self._what == "input":
            hidden = hidden * 2
        results = self._body(hidden, state)
        if self._what == "result":
            results[0].mul_(2)
        if self._what == "cache":
            state.key_caches[1][0, 0, 3] = 5.0
        return results


@pytest.mark.parametrize("what", ["result", "cache"])
def test_what_torch_changes_in_place_shows_in_the_rehearsal(
    model_folder: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    engine = engine_with_pools(model_folder)
    assert not try_to_record(engine, Changed(engine, what))
    assert "recorded they computed something else" in caplog.text
    assert try_to_record(engine, Changed(engine, "nothing"))


def test_what_torch_computes_between_is_seen_at_once(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    engine = engine_with_pools(model_folder)
    assert not try_to_record(engine, Changed(engine, "input"))
    assert "operation 0, norm, reads what torch computed" in caplog.text
