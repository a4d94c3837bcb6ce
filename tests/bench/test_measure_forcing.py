import math

import numpy as np
import pytest
import torch
from measure.engines import make_engine, parse_engine_options
from measure.forcing import Forcer, divergence, surprise, windows

from octavo.common.options import OptionError


def test_windows_cover_the_tokens_once() -> None:
    tokens = np.arange(20, dtype=np.int32)
    parts = windows(tokens, window=8, count=18)
    assert [len(part) for part in parts] == [8, 8, 2]
    assert np.concatenate(parts).tolist() == list(range(18))


def test_divergence_of_two_coins() -> None:
    fair = torch.tensor([[0.0, 0.0]])
    loaded = torch.log(torch.tensor([[0.9, 0.1]])) + 5  # logits: a constant changes nothing
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert divergence(fair, loaded).item() == pytest.approx(expected, rel=1e-6)
    assert divergence(fair, fair).item() == 0
    assert divergence(loaded, fair).item() != pytest.approx(expected, rel=0.1)


def test_surprise_is_of_the_token_that_followed() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    costs = surprise(logits, torch.tensor([0, 1], dtype=torch.int32))
    assert costs.tolist() == pytest.approx([math.log(4), math.log(2)])


def test_chunks_give_the_logits_of_one_pass() -> None:
    _, engine = make_engine(parse_engine_options("--engine torch --threads 1"))
    tokens = np.random.default_rng(0).integers(20, 40_000, 40).astype(np.int32)
    (whole,) = Forcer(engine, window=48, chunk=48).logits(tokens)
    parts = list(Forcer(engine, window=48, chunk=7).logits(tokens))
    assert [len(part) for part in parts] == [7, 7, 7, 7, 7, 5]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="40 tokens are more than the window of 32"):
        next(Forcer(engine, window=32, chunk=8).logits(tokens))


def test_options_of_an_engine_are_a_workers() -> None:
    assert parse_engine_options("--threads 3 --dtype bfloat16").threads == 3
    with pytest.raises((SystemExit, OptionError)):
        parse_engine_options("--no-such-option 1")
