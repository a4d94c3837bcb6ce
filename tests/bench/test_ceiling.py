import ceiling
import pytest
from loadgen.lengths import Lengths
from measure.ceilings import Ceilings, ModelCost
from small_model import CONFIG

WEIGHTS = 3 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16) + 8 * 32
TOKEN_BYTES = 2 * 3 * 2 * 2 * 4


def rate(requests: list[Lengths], clients: int, flops: float, memory: float) -> float:
    return ceiling._rate(requests, clients, ModelCost.of(CONFIG), Ceilings(2, flops, memory))


def test_slow_memory_reads_the_weights_in_every_step_and_what_is_cached() -> None:
    seconds = (4 * WEIGHTS + 10 * TOKEN_BYTES) + (4 * WEIGHTS + 11 * TOKEN_BYTES)
    assert rate([Lengths(10, 2)], 1, 1e30, 1.0) == pytest.approx(2 / seconds)
    both = (4 * WEIGHTS + 20 * TOKEN_BYTES) + (4 * WEIGHTS + 22 * TOKEN_BYTES)
    assert rate([Lengths(10, 2)] * 2, 2, 1e30, 1.0) == pytest.approx(4 / both)
    assert rate([Lengths(10, 2)] * 2, 1, 1e30, 1.0) == pytest.approx(4 / (2 * seconds))


def test_slow_arithmetic_computes_prompts_and_one_token_of_each() -> None:
    layers = WEIGHTS - 8 * 32
    first, second = 2 * (10 * layers + 8 * 32), 2 * WEIGHTS
    assert rate([Lengths(10, 2)], 1, 1.0, 1e30) == pytest.approx(2 / (first + second))
    # The second request begins in the third step, when the first has ended.
    assert rate([Lengths(10, 2)] * 2, 1, 1.0, 1e30) == pytest.approx(2 / (first + second))
    third = 2 * (2 * layers + 2 * 8 * 32)
    together = 2 * (20 * layers + 2 * 8 * 32) + third
    assert rate([Lengths(10, 2)] * 2, 2, 1.0, 1e30) == pytest.approx(4 / together)
