"""The tables of rotary position embeddings, and the rules that stretch them to longer contexts."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.common.gguf_file import GgufError
from octavo.common.modelfiles import ModelError, ModelFiles, gguf_reader
from octavo.kernels.reference.rotary import inverse_frequencies, rotary_table

# Hugging Face's name for each of a GGUF file's keys, which start with the architecture.
_GGUF_KEYS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attn_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_GLOBAL = "full_attention"
_GGUF_DIVISORS = "rope_freqs.weight"  # of the frequencies: how converters store the rule `llama3`
_GGUF_LONG = "rope_factors_long.weight"


class RopeSettings:
    """The rotary settings of a configuration, whichever way it was written."""

    def __init__(self, files: ModelFiles) -> None:
        config = files.config
        outer = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        values: dict[str, Any] = {key: config[key] for key in outer if key in config}
        for key in ("rope_scaling", "rope_parameters"):  # older and newer configurations
            own = config.get(key) or {}
            values |= own.get(_GLOBAL) or own  # of families whose layers differ: those without a window
        family = config["model_type"]
        for key, name in _GGUF_KEYS.items():
            if f"{family}.{key}" in files.gguf:
                values[name] = files.gguf[f"{family}.{key}"]
        self.kind = str(values.get("rope_type") or values.get("type") or "default")
        self.theta = float(values.get("rope_theta") or 10_000.0)
        self.partial = float(values.get("partial_rotary_factor") or 1.0)
        self._path, self._values = files.path, values

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number. Raises ModelError where it is neither there nor has a default."""
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(f"`{key}` is missing or not positive")
        return float(value)

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self._path}: in the rotary scaling of type {self.kind!r}, {what}")

    def has(self, *keys: str) -> bool:
        return all(self._values.get(key) for key in keys)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._values.get(key, default))


def rope_table(files: ModelFiles, head_dim: int, rotary_dim: int, max_positions: int) -> Tensor:
    """``[max_positions, head_dim]``, as `rotary_table`, by the rules of the configuration.

    Args:
        rotary_dim: dimensions of a head that turn; the pairs of the others stay as they are.

    Raises:
        ModelError: the scaling is not known, or a number of it is missing.
    """
    settings = RopeSettings(files)
    rule = _RULES.get(settings.kind)
    if rule is None or _GGUF_LONG in _gguf_tensors(files):
        kind = "longrope" if rule else settings.kind
        known = ", ".join(sorted(_RULES))
        raise ModelError(
            f"{files.path}: rotary scaling of type {kind!r} is not supported; these are: {known}"
        )
    frequencies, attention_factor = rule(inverse_frequencies(rotary_dim, settings.theta), settings)
    divisors = _gguf_divisors(files, len(frequencies))
    if divisors is not None:
        frequencies = frequencies / divisors
    return rotary_table(frequencies, max_positions, attention_factor, (head_dim - rotary_dim) // 2)


def _gguf_tensors(files: ModelFiles) -> dict[str, Any]:
    return gguf_reader(files.path).tensors if files.format == "gguf" else {}


def _gguf_divisors(files: ModelFiles, count: int) -> Tensor | None:
    """In float32 whatever the model computes in: in fewer bits, distant positions would drift."""
    stored = _gguf_tensors(files).get(_GGUF_DIVISORS)
    if stored is None:
        return None
    if stored.kind != 0 or tuple(stored.shape) != (count,):
        raise ModelError(f"{files.path}: tensor {_GGUF_DIVISORS} is not [{count}] numbers in float32")
    try:
        data = gguf_reader(files.path).data(stored, 4 * count)
    except GgufError as error:
        raise ModelError(f"{files.path}: {error}") from error
    return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))


# -- the rules: from frequencies [rotary_dim / 2] to those in use, and the attention factor ------------


def _unscaled(frequencies: Tensor, settings: RopeSettings) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(frequencies: Tensor, settings: RopeSettings) -> tuple[Tensor, float]:
    """Position interpolation: Chen et al., "Extending context window", 2023, equation 4."""
    return frequencies / settings.number("factor"), 1.0


def _llama3(frequencies: Tensor, settings: RopeSettings) -> tuple[Tensor, float]:
    """Llama 3.1's rule: slow pairs are interpolated, fast ones kept, those between are blended.

    How fast a pair is, the number of its turns within the original context says.
    """
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if high <= low:
        raise settings.error("`high_freq_factor` is not above `low_freq_factor`")
    turns = frequencies * settings.number("original_max_position_embeddings") / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return _blended(frequencies, kept, settings.number("factor")), 1.0


def _yarn(frequencies: Tensor, settings: RopeSettings) -> tuple[Tensor, float]:
    """YaRN: Peng et al., 2023, section 3.2 (by parts) and 3.4 (the attention factor)."""
    pairs, factor = len(frequencies), settings.number("factor")
    original = settings.number("original_max_position_embeddings")

    def pair_of(turns: float) -> float:
        """Where the pair stands that turns so often within the original context."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(settings.theta)

    first = pair_of(settings.number("beta_fast", 32.0))
    last = pair_of(settings.number("beta_slow", 1.0))
    if settings.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001
    stretched = ((torch.arange(pairs).float() - first) / width).clamp(0.0, 1.0)
    return _blended(frequencies, 1.0 - stretched, factor), _yarn_factor(factor, settings)


def _yarn_factor(factor: float, settings: RopeSettings) -> float:
    def longer(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    if settings.has("attention_factor"):
        return settings.number("attention_factor")
    if settings.has("mscale", "mscale_all_dim"):
        return longer(settings.number("mscale")) / longer(settings.number("mscale_all_dim"))
    return longer(1.0) * settings.number("attn_factor", 1.0)  # which GGUF files may have on top


def _blended(frequencies: Tensor, kept: Tensor, factor: float) -> Tensor:
    """`kept` of each frequency as it is, the rest of it interpolated."""
    return frequencies * kept + frequencies / factor * (1.0 - kept)


_RULES: dict[str, Callable[[Tensor, RopeSettings], tuple[Tensor, float]]] = {
    "default": _unscaled,
    "none": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
