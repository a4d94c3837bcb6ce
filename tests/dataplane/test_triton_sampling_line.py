"""The same seed gives the same tokens with the Triton kernels, in the interpreter, up to ties."""

import pytest
import torch
from decisions import decision_margins
from test_sampling_line import COUNT, MARGIN, PROMPT, forced_logits, params, sampled_history
from torch import Tensor

from octavo.common.modelfiles import open_model
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.kernels.table import CPU, kernels_named
from octavo.kernels.triton.sampling import sample


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine(open_model("demo"), "cpu", "float32")


@pytest.fixture(scope="module")
def history(engine: TorchEngine) -> list[int]:
    return sampled_history(engine)


@pytest.fixture(scope="module")
def logits(engine: TorchEngine, history: list[int]) -> Tensor:
    return forced_logits(engine, history)


def check(found: Tensor, logits: Tensor, history: list[int]) -> None:
    """Draws from `found` with Triton and from `logits` with torch, and compares what is sure."""
    given = params(COUNT, len(PROMPT))
    # Wide tiles: the interpreter takes as long for a small one.
    drawn = sample(found, given, block=1 << 14, narrow=1 << 14)
    sure = decision_margins(logits, given, slack=1e-4) > MARGIN
    assert sure.float().mean() >= 0.95
    assert torch.equal(drawn[sure], CPU.sample(logits, given)[sure])
    assert torch.equal(drawn[sure], torch.tensor(history[len(PROMPT) :])[sure])


def test_the_sampler_draws_what_torch_draws(logits: Tensor, history: list[int]) -> None:
    check(logits, logits, history)


@pytest.mark.full
@pytest.mark.timeout(1200)  # thirty layers, interpreted
def test_the_whole_model_draws_what_torch_draws(logits: Tensor, history: list[int]) -> None:
    kernels = kernels_named("triton", "cpu")
    found = forced_logits(TorchEngine(open_model("demo"), "cpu", "float32", kernels), history)
    check(found, logits, history)
