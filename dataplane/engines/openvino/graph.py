"""Builds a model's graphs by running its `forward` once on symbols."""

from dataclasses import fields
from typing import Any

import openvino as ov
from openvino import Type
from openvino import opset13 as ops

from octavo.dataplane.engines.openvino.adapter import RowInputs, cache_input
from octavo.dataplane.engines.openvino.operations import Rotations
from octavo.dataplane.engines.openvino.symbols import CacheSymbol, Symbol
from octavo.dataplane.models.layers import ForwardState
from octavo.dataplane.models.model import Model

_TOKEN_INPUTS = ("token_ids", "positions", "logit_tokens")
# The body's caches come after its other inputs: the keys of all layers, then the values.
FIRST_CACHE = len(_TOKEN_INPUTS) + len(fields(RowInputs))


def body_of(model: Model) -> ov.Model:
    """From tokens, rows and caches to the final hidden states at logit_tokens, ``[n, hidden_size]``.

    The inputs by position: token_ids, positions, logit_tokens, those of `RowInputs`, the caches.
    """
    token_ids, positions, logit_tokens = (_flat_input(name) for name in _TOKEN_INPUTS)
    rows = RowInputs.make()
    layers = range(model.config.num_layers)
    heads = model.config.num_kv_heads
    keys, values = [[CacheSymbol(cache_input(), heads) for _ in layers] for _ in range(2)]
    rotations = [Rotations.at(table, positions) for table in model.rotations]
    stand_ins: Any = (Symbol(positions), rotations, rows, None, keys, values)
    hidden: Symbol = model(Symbol(token_ids), ForwardState(*stand_ins), Symbol(logit_tokens))
    inputs = [token_ids, positions, logit_tokens, *rows.all()]
    inputs += [cache.value for cache in (*keys, *values)]
    return ov.Model([hidden.value], [value.get_node() for value in inputs], "body")


def head_of(model: Model) -> ov.Model:
    """From hidden states ``[n, hidden_size]`` to logits ``[n, vocab_size]``."""
    hidden = ops.parameter([-1, model.config.hidden_size], Type.f32, name="hidden")
    stand_in: Any = Symbol(hidden)
    logits: Any = model.logits(stand_in)
    return ov.Model([logits.value], [hidden], "head")


def _flat_input(name: str) -> ov.Output:
    return ops.parameter([-1], Type.i32, name=name).output(0)
