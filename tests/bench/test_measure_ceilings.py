import pytest
from measure.ceilings import Ceilings, ModelCost, measure_ceilings
from small_model import CONFIG


def test_cost_counts_the_matrices_of_a_llama() -> None:
    cost = ModelCost.of(CONFIG, token_bytes=96)
    query_and_output, key_and_value, mlp = 2 * 8 * 8, 2 * 8 * 4, 3 * 8 * 16
    assert cost.layer_weights == 3 * (query_and_output + key_and_value + mlp)
    assert cost.head_weights == 8 * 32
    # Scores and weighted values: 2 products of head_dim 2, for each of 4 heads and 3 layers.
    assert cost.attention_flops == 2 * 2 * 2 * 4 * 3
    assert cost.flops(5, 1, 7) == 2 * (5 * cost.layer_weights + cost.head_weights) + 7 * 96
    assert cost.bytes_read(10) == 4 * (cost.layer_weights + cost.head_weights) + 960


def test_an_explicit_head_size_counts() -> None:
    cost = ModelCost.of({**CONFIG, "head_dim": 4}, token_bytes=96)
    assert cost.layer_weights == 3 * (2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 16)


def test_the_floor_is_the_slower_of_the_two_limits() -> None:
    cost = ModelCost.of(CONFIG, token_bytes=96)
    assert cost.floor(
        600, 10, Ceilings(threads=2, matmul_flops=100.0, memory_bytes=10.0)
    ) == pytest.approx(6.0)
    assert cost.floor(
        600, 90, Ceilings(threads=2, matmul_flops=100.0, memory_bytes=10.0)
    ) == pytest.approx(9.0)


def test_ceilings_are_those_of_a_real_machine() -> None:
    ceilings = measure_ceilings(tries=1)
    assert 1e8 < ceilings.matmul_flops < 1e15
    assert 1e8 < ceilings.memory_bytes < 1e13
