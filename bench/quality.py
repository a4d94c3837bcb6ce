#!/usr/bin/env python3
"""How far engines with reduced precision are from one in float32, over a text in English.

Each engine is fed the same tokens, in chunks through its paged cache, and its distribution at every
position is compared with the base's: Kullback-Leibler divergence, whether the likeliest token is the
same, and the perplexity of the text. Options of an engine are those of `octavo worker`:

    python bench/quality.py --json quality.json
    python bench/quality.py --variant 'bfloat16=--engine torch --dtype bfloat16' --variant 'default='

The text is this repository's own prose, so that every checkout has it.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from loadgen.options import integer
from measure.engines import make_engine, parse_engine_options
from measure.figures import number, table
from measure.forcing import Forcer, Ints, divergence, surprise, windows
from measure.machine import describe, write_json
from torch import Tensor

from octavo.common.modelfiles import ModelError, ModelFiles, open_model
from octavo.common.options import OptionError
from octavo.dataplane.engine import EngineError
from octavo.dataplane.options import WorkerOptions
from octavo.frontend.tokenizer import open_tokenizer

_REPOSITORY = Path(__file__).resolve().parents[1]
_TEXTS = [_REPOSITORY / "docs" / "architecture.md", _REPOSITORY / "LICENSE"]

# Weights, then the KV cache.
_VARIANTS = {
    "f32, f32": "--engine openvino --quantization none --kv-dtype float32",
    "exact 4-bit, f32": "--quantization exact4",
    "int8, f32": "--quantization int8",
    "exact 4-bit, int16 activations, f32": "--quantization exact4 --activations int16",
    "exact 4-bit, int8 activations, f32": "--quantization exact4 --activations int8",
    "int8, int8 activations, f32": "--quantization int8 --activations int8",
    "f32, f16": "--engine openvino --quantization none --kv-dtype float16",
    "f32, u8": "--engine openvino --quantization none --kv-dtype uint8",
    "int8, u8": "--engine openvino --quantization int8 --kv-dtype uint8",
    "exact 4-bit, u8": "--engine openvino --quantization exact4 --kv-dtype uint8",
}


@dataclass(frozen=True)
class Figure:
    """One engine against the base."""

    name: str
    engine: str
    tokens: int
    kl_mean: float  # nats
    kl_p99: float
    kl_max: float
    top1_agreement: float  # share of positions
    perplexity: float  # of the text under this engine


def main() -> int:
    options = _parser().parse_args()
    try:
        base = parse_engine_options(options.base)
        chosen = dict(options.variant or _VARIANTS)
        variants = {name: parse_engine_options(text) for name, text in chosen.items()}
        figures = _measure(base, variants, options)
    except (ModelError, EngineError, OptionError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(_text(figures))
    if options.json:
        found = {"figures": [asdict(figure) for figure in figures]}
        write_json(
            options.json, describe(found, {**vars(options), "text": list(map(str, options.text))})
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--variant",
        type=_variant,
        action="append",
        metavar="NAME=OPTIONS",
        help="default: weights and activations of native kernels, KV caches of OpenVINO",
    )
    parser.add_argument(
        "--base", default="--engine torch --dtype float32 --quantization none", metavar="OPTIONS"
    )
    parser.add_argument("--text", type=Path, nargs="+", default=_TEXTS, metavar="FILE", help="UTF-8")
    parser.add_argument("--tokens", type=integer(2), default=2048, help="of the text (default: 2048)")
    parser.add_argument("--window", type=integer(2), default=512, help="tokens with one past")
    parser.add_argument("--chunk", type=integer(1), default=64, help="tokens of one forward")
    parser.add_argument("--json", metavar="FILE", help="where to write all figures")
    return parser


def _variant(text: str) -> tuple[str, str]:
    name, separator, rest = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=OPTIONS")
    return name, rest


def _measure(
    base: WorkerOptions, variants: dict[str, WorkerOptions], options: argparse.Namespace
) -> list[Figure]:
    parts = _windows(open_model(base.model), options)
    expected, name = _all_logits(base, parts, options)
    figures = [_figure("base", name, parts, expected, expected)]
    for variant, worker in variants.items():
        found, name = _all_logits(worker, parts, options)
        figures.append(_figure(variant, name, parts, expected, found))
    return figures


def _windows(files: ModelFiles, options: argparse.Namespace) -> list[Ints]:
    """Raises OSError for a text that cannot be read, and OptionError for one that is too short."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in options.text)
    tokens = np.array(open_tokenizer(files).encode(text), dtype=np.int32)
    if len(tokens) < options.tokens:
        raise OptionError(f"--tokens {options.tokens}: the text has {len(tokens)} tokens")
    return windows(tokens, options.window, options.tokens)


def _all_logits(
    worker: WorkerOptions, parts: Sequence[Ints], options: argparse.Namespace
) -> tuple[list[Tensor], str]:
    """The logits of each window, ``[tokens, vocab_size]``, and the engine's name."""
    _, engine = make_engine(worker)
    forcer = Forcer(engine, options.window, options.chunk)
    found = []
    for part in parts:
        found.append(torch.cat(list(forcer.logits(part))))
        print(f"{len(found)} of {len(parts)} windows", file=sys.stderr, flush=True)
    return found, engine.describe().engine


def _figure(
    name: str, engine: str, parts: Sequence[Ints], expected: Sequence[Tensor], found: Sequence[Tensor]
) -> Figure:
    pairs = list(zip(expected, found, strict=True))
    kl = torch.cat([divergence(base, other) for base, other in pairs])
    agrees = torch.cat([base.argmax(dim=1) == other.argmax(dim=1) for base, other in pairs])
    costs = [
        surprise(logits[:-1], torch.from_numpy(part[1:]))
        for part, logits in zip(parts, found, strict=True)
    ]
    return Figure(
        name=name,
        engine=engine,
        tokens=len(kl),
        kl_mean=float(kl.mean()),
        kl_p99=float(kl.quantile(0.99)),
        kl_max=float(kl.max()),
        top1_agreement=float(agrees.double().mean()),
        perplexity=math.exp(float(torch.cat(costs).mean())),
    )


def _text(figures: Sequence[Figure]) -> str:
    header = ["", "engine", "KL mean, nats", "KL p99", "KL max", "top-1 the same", "perplexity"]
    rows = [
        [
            figure.name,
            figure.engine,
            *(f"{value:.2e}" for value in (figure.kl_mean, figure.kl_p99, figure.kl_max)),
            f"{figure.top1_agreement:.1%}",
            number(figure.perplexity),
        ]
        for figure in figures
    ]
    return f"{table(header, rows)}\n{figures[0].tokens} tokens"


if __name__ == "__main__":
    sys.exit(main())
