import pytest
import torch
from measure.stepping import Shape, Stepper

from octavo.common.modelfiles import open_model
from octavo.dataplane.engines.torch_engine import TorchEngine


@pytest.fixture(scope="module")
def stepper() -> Stepper:
    torch.set_num_threads(1)
    files = open_model("demo")
    engine = TorchEngine(files, "cpu", "float32")
    return Stepper(files, engine, Shape(sequences=3, max_tokens=24, block_size=8), seed=0)


def test_sequences_have_blocks_of_their_own() -> None:
    assert Shape(sequences=3, max_tokens=24, block_size=8).blocks_each == 3
    assert Shape(sequences=3, max_tokens=25, block_size=8).blocks_each == 4


def test_steps_run_again_and_again(stepper: Stepper) -> None:
    for tokens in (20, 9):
        stepper.spread(3, tokens)
        assert all(stepper.decode(3) > 0 for _ in range(3))
    assert stepper.prefill(24) > 0
    assert stepper.token_bytes == 2 * 30 * 3 * 64 * 4  # K and V, layers, heads, head size, fp32


def test_steps_beyond_the_room_are_refused(stepper: Stepper) -> None:
    stepper.spread(2, 23)
    stepper.decode(2)
    with pytest.raises(ValueError, match="beyond 24 tokens"):
        stepper.decode(2)
