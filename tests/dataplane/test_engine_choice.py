"""Which engine a worker takes, what it says about it, and which options do not go together."""

import importlib
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from controlplane_side import ControlPlaneSide, WorkerProcess
from test_worker_process import first_plan
from tiny_llama import hf_greedy, prompt_of
from transformers import LlamaForCausalLM

from octavo.common.modelfiles import ModelFiles, open_model
from octavo.dataplane.engine import EngineError
from octavo.dataplane.engines.choice import (
    choose_kernels,
    choose_packing,
    load_engine,
    obstacle_to_openvino,
)
from octavo.dataplane.engines.openvino import adapter
from octavo.dataplane.options import WorkerOptions
from octavo.kernels.table import CPU, kernels_named
from octavo.proto.plan import Result
from octavo.proto.session import Register


@pytest.fixture(scope="module")
def files(model_folder: Path) -> ModelFiles:
    return open_model(str(model_folder))


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Loading an engine sets torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """With native kernels nobody asks for the library."""
    monkeypatch.setattr("octavo.dataplane.engines.choice.native_kernels", lambda: None)


def options(**given: object) -> WorkerOptions:
    return WorkerOptions(device="cpu", threads=1, **given)  # type: ignore[arg-type]


def loaded(files: ModelFiles, **given: object) -> str:
    return load_engine(files, options(**given)).describe().engine


@pytest.mark.usefixtures("without_native")
def test_auto_takes_openvino_without_native_kernels_and_says_so(
    files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert loaded(files) == "openvino"
    assert "OpenVINO engine: weights none, KV cache float32, 1 threads (--engine auto)" in caplog.text


@pytest.mark.parametrize(
    ("quantization", "weights"), [("auto", "float32"), ("int8", "weights int8, activations float32")]
)
def test_auto_takes_native_kernels_and_says_so(
    files: ModelFiles, caplog: pytest.LogCaptureFixture, quantization: str, weights: str
) -> None:
    with caplog.at_level(logging.INFO):
        assert loaded(files, quantization=quantization) == "torch"
    said = rf"{weights} on cpu, KV cache float32, native kernels \(\w+\), 1 threads"
    assert re.search(said, caplog.text)
    assert "native kernels are faster than OpenVINO" in caplog.text
    assert torch.get_num_threads() == 1


def test_auto_takes_openvino_for_what_native_kernels_cannot(files: ModelFiles) -> None:
    assert loaded(files, kv_dtype="float16") == "openvino"


@pytest.mark.parametrize("activations", ["float32", "int16", "int8"])
def test_native_kernels_multiply_integers_with_what_was_asked_for(
    files: ModelFiles, caplog: pytest.LogCaptureFixture, activations: str
) -> None:
    with caplog.at_level(logging.INFO):
        assert loaded(files, quantization="int8", activations=activations) == "torch"
    assert f"weights int8, activations {activations} on cpu" in caplog.text


def test_native_kernels_are_for_float32(files: ModelFiles) -> None:
    assert choose_kernels("auto", "cpu", "bfloat16") is choose_kernels("auto", "cpu", "float16") is CPU
    assert choose_kernels("native", "cpu", "float32") is kernels_named("native", "cpu")
    with pytest.raises(
        EngineError, match="--kernels native: they compute in float32, and --dtype is b"
    ):
        loaded(files, kernels="native", dtype="bfloat16")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"block_size": 16}, "it takes blocks of 32 tokens, and --block-size is 16"),
        ({"dtype": "bfloat16"}, "it computes in float32, which --dtype bfloat16 does not allow"),
        ({"kernels": "reference"}, "--kernels reference names operations of the torch engine"),
    ],
)
def test_auto_takes_torch_where_it_must_and_says_why(
    files: ModelFiles, caplog: pytest.LogCaptureFixture, given: dict[str, object], reason: str
) -> None:
    with caplog.at_level(logging.INFO):
        assert loaded(files, **given) == "torch"
    assert f"not OpenVINO, since {reason}" in caplog.text
    with pytest.raises(EngineError, match=f"--engine openvino: {reason}"):
        loaded(files, engine="openvino", **given)


def test_a_gpu_is_not_for_openvino() -> None:
    assert "the device is cuda:0" in str(obstacle_to_openvino(options(), "cuda:0"))


def test_an_asked_for_engine_is_taken(files: ModelFiles) -> None:
    assert loaded(files, engine="openvino", block_size=32) == "openvino"
    assert loaded(files, engine="torch", block_size=32) == "torch"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"kernels": "reference", "quantization": "int8"},
            r"--quantization int8: the torch engine without native kernels has no integers",
        ),
        (
            {"engine": "torch", "activations": "int8"},
            r"--activations int8: .* --quantization leaves the weights as they are",
        ),
        (
            {"engine": "openvino", "activations": "int16"},
            r"--engine openvino: --activations int16 is of the torch engine",
        ),
        ({"block_size": 8, "kv_dtype": "uint8"}, r"--kv-dtype uint8 is .* --block-size is 8"),
        ({"quantization": "exact4"}, r"--quantization exact4: .* has no Q4_0, Q4_1 or Q4_K weights"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    files: ModelFiles, given: dict[str, object], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        loaded(files, **given)


def test_weights_are_kept_as_the_file_has_them(files: ModelFiles) -> None:
    demo = open_model("demo")
    assert [choose_packing(demo, q) for q in ("auto", "exact4", "int8", "none")] == [
        "exact4",
        "exact4",
        "int8",
        "none",
    ]
    assert choose_packing(files, "auto") == "none"


# -- a library that is not as it was ------------------------------------------------------------------


def check_falls_back(files: ModelFiles, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    with caplog.at_level(logging.INFO):
        assert loaded(files) == "torch"
    assert f"not OpenVINO, since {reason}" in caplog.text
    with pytest.raises(EngineError, match=f"--engine openvino: {reason}"):
        loaded(files, engine="openvino")


@pytest.mark.usefixtures("without_native")
def test_an_unknown_version_is_left_alone(
    files: ModelFiles, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter.ov, "__version__", "2031.0.0-1-abc")
    check_falls_back(files, caplog, "OpenVINO 2031.0.0 is installed, and its paged attention is known")


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("missing", [1, 28])
def test_an_operation_that_wants_other_inputs_is_left_alone(
    files: ModelFiles, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    real = adapter._operation()
    monkeypatch.setattr(adapter, "_operation", lambda: lambda inputs: real(inputs[:-missing]))
    check_falls_back(files, caplog, "OpenVINO's paged attention is not as expected")


@pytest.mark.usefixtures("without_native")
def test_a_missing_library_is_told(
    files: ModelFiles, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "octavo.dataplane.engines.openvino.adapter", None)
    check_falls_back(files, caplog, "it cannot be loaded")
    monkeypatch.undo()
    assert importlib.import_module(adapter.__name__) is adapter


# -- a worker process ---------------------------------------------------------------------------------


def test_a_worker_serves_with_openvino(
    model_folder: Path, hf_model: LlamaForCausalLM, tmp_path: Path
) -> None:
    side = ControlPlaneSide()
    worker = WorkerProcess(
        tmp_path, model=str(model_folder), worker_port=side.port, num_kv_blocks=8, engine="openvino"
    )
    try:
        registered = side.receive(Register)
        assert (registered.engine, registered.block_sizes.tolist()) == ("openvino", [32])
        assert registered.preferred_block_size == 32
        side.reset(3, block_size=32, num_blocks=40)
        side.data(first_plan(3, blocks=(37,)).pack())
        assert side.receive(Result).tokens.tolist() == hf_greedy(hf_model, prompt_of(6), 1)
        assert worker.stop() == 0
    finally:
        worker.close()
        side.close()
