"""Fixtures of the data plane: one tiny random model, loaded once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from controlplane_side import ControlPlaneSide, WorkerProcess
from tiny_llama import save_tiny_llama, tiny_llama
from transformers import LlamaForCausalLM

from octavo.common.modelfiles import open_model
from octavo.dataplane.engines.torch_engine import TorchEngine


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def side() -> Iterator[ControlPlaneSide]:
    side = ControlPlaneSide()
    yield side
    side.close()


@pytest.fixture(scope="session")
def hf_model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, hf_model: LlamaForCausalLM) -> Path:
    return save_tiny_llama(hf_model, tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def worker(
    side: ControlPlaneSide, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("logs")
    worker = WorkerProcess(folder, model=str(model_folder), worker_port=side.port, num_kv_blocks=32)
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def engine(model_folder: Path) -> TorchEngine:
    return TorchEngine(open_model(str(model_folder)), "cpu", "float32")
