"""What decode graphs read: the fixed places of a batch's numbers. The graphs themselves need a GPU."""

import numpy as np
import pytest
import torch
from plan_maker import PlanMaker
from tiny_llama import prompt_of

from octavo.dataplane.batching import batch_of, rows_of
from octavo.dataplane.engine import Batch
from octavo.dataplane.engines.decode_graphs import inputs_in, is_decode, numbers_of, rehearsals
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.proto.plan import Plan
from octavo.proto.wire import int32s


def decode_batch(maker: PlanMaker) -> Batch:
    """Three sequences that were just prefilled, in an order of their own."""
    maker.prefill(*(maker.admit(slot, prompt_of(5 + slot, slot), 20) for slot in range(3)))
    plan = Plan(epoch=1, number=9, decode_slots=int32s([2, 0, 1]))
    rows = rows_of(plan, maker.slots, 100)
    return batch_of(rows, maker.slots, rows.last_tokens())


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_padded_batch_computes_the_same(engine: TorchEngine, size: int) -> None:
    maker = PlanMaker(engine)
    batch = decode_batch(maker)
    wanted = engine.forward(batch)
    before = [pool.clone() for pool in engine._pools.all()]
    numbers = torch.from_numpy(numbers_of(batch, size, most_blocks=40))
    with torch.inference_mode():
        found = engine._compute(inputs_in(numbers, size, most_blocks=40))
    assert found.shape[0] == size
    assert torch.allclose(found[:3], wanted, atol=1e-5)
    after = engine._pools.all()
    assert all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(after, before, strict=True)
    )


def test_only_one_query_per_row_with_its_logits_is_a_decode(engine: TorchEngine) -> None:
    batch = decode_batch(PlanMaker(engine))
    assert is_decode(batch)
    fields = vars(batch)
    assert not is_decode(Batch(**fields | {"logit_tokens": int32s([0, 2, 1])}))
    assert not is_decode(Batch(**fields | {"logit_tokens": int32s([0, 1])}))
    chunk = {"query_begins": int32s([0, 2, 3]), "context_lens": int32s([0, 4])}
    assert not is_decode(Batch(**fields | chunk))


def test_rehearsals_run_and_store_nothing(engine: TorchEngine) -> None:
    engine.make_pools(4, 16, 0)
    for pool in engine._pools.all():
        pool.zero_()
    kinds = set()
    for batch in rehearsals(16, longest=100):
        kinds.add((is_decode(batch), int(batch.context_lens.max()) == 100))
        assert np.isfinite(engine.forward(batch).numpy()).all()
    assert kinds == {(True, True), (True, False), (False, True), (False, False)}
    assert not any(pool.any() for pool in engine._pools.all())
