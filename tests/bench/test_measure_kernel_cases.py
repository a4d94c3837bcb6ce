import pytest
import torch
from measure.kernel_cases import Case, Load, Sizes, cases

from octavo.kernels.table import CPU, REFERENCE, Kernels

SIZES = Sizes(hidden=12, heads=4, kv_heads=2, head_dim=8, intermediate=10, vocab=50, layers=2)
LOAD = Load(batches=(1, 3), context=9, prefill=5, block_size=4)
FLOAT = 4


@pytest.fixture(autouse=True)
def _few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("measure.kernel_cases._ROTATE_BYTES", 4096)


def made(kernels: Kernels = CPU) -> dict[tuple[str, str], Case]:
    return {(case.operation, case.size): case for case in cases(kernels, SIZES, LOAD)}


def test_sizes_come_from_a_configuration() -> None:
    config = {
        "hidden_size": 12,
        "num_attention_heads": 3,
        "intermediate_size": 10,
        "vocab_size": 50,
        "num_hidden_layers": 2,
    }
    sizes = Sizes.of(config)
    assert (sizes.kv_heads, sizes.head_dim) == (3, 4)
    assert Sizes.of({**config, "num_key_value_heads": 1, "head_dim": 6}).head_dim == 6


@pytest.mark.parametrize("kernels", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_every_operation_of_the_table_has_a_case_that_runs(kernels: Kernels) -> None:
    found = made(kernels)
    missing = set(vars(kernels)) - {operation for operation, _ in found}
    # Once, when a model is loaded; and no operation itself.
    assert missing == {"prepare_linear", "record"}
    for case in found.values():
        for turn in range(5):
            case.run(turn)


def test_attention_reads_the_cache_once() -> None:
    found = made()
    decodes = found["paged_attention", "3 x 9"]
    cache, queries = 2 * 3 * 9 * 2 * 8, 2 * 3 * 4 * 8  # keys and values; queries and outputs
    assert decodes.bytes == (cache + queries) * FLOAT
    assert decodes.flops == 4 * 3 * 9 * 4 * 8
    assert found["paged_attention", "prefill 5"].flops == 4 * (1 + 2 + 3 + 4 + 5) * 4 * 8


def test_a_product_reads_its_weights_once() -> None:
    head = made()["linear", "head, 3 tokens"]
    assert head.flops == 2 * 3 * 12 * 50
    assert head.bytes == (12 * 50 + 3 * (12 + 50)) * FLOAT
