"""The same seed gives the same tokens with every engine, up to ties."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from decisions import decision_margins
from forwards import SIZE, batch_of_rows
from torch import Tensor

from octavo.common.modelfiles import open_model
from octavo.dataplane.engine import Engine
from octavo.dataplane.engines.choice import with_activations
from octavo.dataplane.engines.openvino.engine import OpenVinoEngine
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.kernels.reference.sampling import DrawParams
from octavo.kernels.table import CPU, kernels_named

PROMPT = [1, 4093, 198, 2683, 359, 260, 2887, 30, 2, 198]  # any text
COUNT, MARGIN = 200, 1e-3
TABLE = [5, 2, 7, 0, 3, 6, 1]


def params(rows: int, first_position: int) -> DrawParams:
    return DrawParams(
        temperature=torch.ones(rows),
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.full((rows,), 0.9, dtype=torch.float64),
        min_p=torch.zeros(rows, dtype=torch.float64),
        seeds=torch.full((rows,), 2024),
        positions=torch.arange(first_position, first_position + rows),
        samples=torch.zeros(rows, dtype=torch.int64),
    )


def sampled_history(engine: Engine) -> list[int]:
    """The prompt and COUNT tokens drawn after it, one by one."""
    engine.make_pools(8, SIZE, 0)
    tokens, computed = list(PROMPT), 0
    while len(tokens) < len(PROMPT) + COUNT:
        batch = batch_of_rows([(tokens, computed, TABLE)], [len(tokens) - computed - 1])
        logits = engine.logits(engine.forward(batch))
        computed = len(tokens)
        tokens.append(int(CPU.sample(logits, params(1, len(tokens)))))
    return tokens


def forced_logits(engine: Engine, tokens: list[int]) -> Tensor:
    """Of all positions whose next token was drawn: ``[COUNT, vocab_size]``."""
    engine.make_pools(8, SIZE, 0)
    wanted = np.arange(len(PROMPT) - 1, len(tokens) - 1).tolist()
    return engine.logits(engine.forward(batch_of_rows([(tokens, 0, TABLE)], wanted)))


def _openvino(packing: str) -> Engine:
    return OpenVinoEngine(open_model("demo"), packing, "float32", threads=1)


def _native(activations: str) -> Engine:
    kernels = with_activations(kernels_named("native", "cpu"), activations)
    return TorchEngine(open_model("demo"), "cpu", "float32", kernels, packing="exact4")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (_openvino, "exact4"),
        pytest.param(_openvino, "none", marks=pytest.mark.full),
        (_native, "int16"),
        pytest.param(_native, "float32", marks=pytest.mark.full),
    ],
)
def test_engines_draw_what_torch_draws_wherever_it_is_sure(
    make: Callable[[str], Engine], kind: str
) -> None:
    engine = make(kind)
    tokens = sampled_history(engine)
    mine = forced_logits(engine, tokens)
    wanted = forced_logits(TorchEngine(open_model("demo"), "cpu", "float32", CPU), tokens)
    drawn = [CPU.sample(logits, params(COUNT, len(PROMPT))) for logits in (mine, wanted)]
    sure = decision_margins(wanted, params(COUNT, len(PROMPT)), slack=1e-4) > MARGIN
    assert sure.float().mean() >= 0.95
    assert torch.equal(drawn[0][sure], drawn[1][sure])
    assert torch.equal(drawn[0][sure], torch.tensor(tokens[len(PROMPT) :])[sure])
    assert len(set(tokens)) > 50
