"""Which definition a family of models uses. A new family is one file and one line here."""

from collections.abc import Callable

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.dataplane.loading.weights import Weights
from octavo.dataplane.models.gemma3 import gemma3
from octavo.dataplane.models.gpt2 import gpt2
from octavo.dataplane.models.llama import llama
from octavo.dataplane.models.mistral import mistral
from octavo.dataplane.models.model import Model
from octavo.dataplane.models.opt import opt
from octavo.dataplane.models.phi3 import phi3
from octavo.dataplane.models.qwen2 import qwen2
from octavo.dataplane.models.qwen3 import qwen3
from octavo.dataplane.models.shard import Collectives
from octavo.kernels.table import Kernels

Define = Callable[[ModelFiles, Weights, Kernels, Collectives], Model]

_FAMILIES: dict[str, Define] = {
    "gemma3": gemma3,  # as GGUF files call it
    "gemma3_text": gemma3,
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "opt": opt,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
}


def family_of(files: ModelFiles) -> Define:
    """The definition of a model's family. Raises ModelError when there is none."""
    family = files.config["model_type"]
    if family not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelError(f"{files.path}: the family {family!r} is not supported; these are: {known}")
    return _FAMILIES[family]
