"""Requests whose answers do not depend on rounding, and their undisturbed answers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from decisions import decision_margins
from forwards import SIZE, batch_of_rows
from shared_files import golden_or_none

from octavo.common.modelfiles import open_model
from octavo.dataplane.engines.torch_engine import TorchEngine
from octavo.frontend.client import Client
from octavo.kernels.reference.sampling import DrawParams

MARGIN = 3e-3  # a decision by less may fall otherwise in another batch
COUNT = 16
# Prompts and seeds whose 48 tokens at temperature 1 are all decided by more than the margin; the
# tests that use them verify it.
SAMPLED = [
    ("The history of bookbinding begins with", 1),
    ("A recipe for bread:", 2),
    ("def fibonacci(n):", 4),
    ("Once upon a time, in a harbour town,", 3),
    ("The three laws of motion are", 1),
    ("Dear Sir or Madam,", 6),
    ("Rain falls on the", 2),
    ("To repair a bicycle tyre, first", 4),
]
LENGTH = 48  # tokens of a sampled answer


@dataclass(frozen=True)
class Case:
    """A request and what it gives when nothing happens."""

    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    tokens: tuple[int, ...]


def run_undisturbed(target: str) -> list[Case]:
    """COUNT cases, each run alone on a service that nobody disturbs."""
    lines = golden_or_none("greedy")[: COUNT - len(SAMPLED)]
    cases = [
        Case(
            tuple(line["prompt_token_ids"]),
            {"temperature": 0.0, "max_tokens": len(line["output_token_ids"])},
            tuple(line["output_token_ids"]),
        )
        for line in lines
    ]
    with Client(target) as client:
        cases += [_run_alone(client, text, seed) for text, seed in SAMPLED]
    return (cases * 2)[:COUNT]


def _run_alone(client: Client, text: str, seed: int) -> Case:
    sampling = {"temperature": 1.0, "seed": seed, "max_tokens": LENGTH, "ignore_eos": True}
    deltas = list(client.generate(text, **sampling))
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    return Case(tuple(deltas[0].prompt_token_ids), sampling, tokens)


def least_margins(cases: list[Case]) -> list[float]:
    """Of each sampled case: by how much its closest decision was made."""
    torch.set_num_threads(1)
    engine = TorchEngine(open_model("demo"), "cpu", "float32")
    return [_least_margin(engine, case) for case in cases if "seed" in case.sampling]


def _least_margin(engine: TorchEngine, case: Case) -> float:
    tokens = [*case.prompt, *case.tokens]
    engine.make_pools(-(-len(tokens) // SIZE), SIZE, 0)
    table = list(range(-(-len(tokens) // SIZE)))
    first, count = len(case.prompt), len(case.tokens)
    wanted = np.arange(first - 1, first - 1 + count).tolist()
    logits = engine.logits(engine.forward(batch_of_rows([(tokens, 0, table)], wanted)))
    params = DrawParams(
        temperature=torch.ones(count),
        top_k=torch.zeros(count, dtype=torch.int64),
        top_p=torch.ones(count, dtype=torch.float64),
        min_p=torch.zeros(count, dtype=torch.float64),
        seeds=torch.full((count,), case.sampling["seed"]),
        positions=torch.arange(first, first + count),
        samples=torch.zeros(count, dtype=torch.int64),
    )
    return float(decision_margins(logits, params, slack=0.0).min())
