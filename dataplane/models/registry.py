"""Which definition a family of models uses. A new family is one file and one line here."""

from collections.abc import Callable

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.dataplane.loading.weights import Weights
from octavo.dataplane.models.llama import Llama
from octavo.kernels.table import Kernels

_FAMILIES: dict[str, Callable[[ModelFiles, Weights, Kernels], Llama]] = {
    "llama": Llama,
}


def family_of(files: ModelFiles) -> Callable[[ModelFiles, Weights, Kernels], Llama]:
    """The definition of a model's family. Raises ModelError when there is none."""
    family = files.config["model_type"]
    if family not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelError(f"{files.path}: the family {family!r} is not supported; these are: {known}")
    return _FAMILIES[family]
