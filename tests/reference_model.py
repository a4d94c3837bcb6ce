"""The demo model in Hugging Face transformers: the independent judge of tokens and probabilities."""

import functools
from typing import Any

import torch

from octavo.common.modelfiles import open_model


@functools.cache
def reference_model() -> Any:
    """SmolLM2 in float32, dequantised by transformers from the same GGUF."""
    from transformers import AutoModelForCausalLM

    path = open_model("demo").path
    return AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()


@torch.inference_mode()
def reference_logprobs(token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities ``[len(token_ids) - 1, vocabulary]``; row i is about token i + 1."""
    logits = reference_model()(torch.tensor([token_ids])).logits[0, :-1]
    return torch.log_softmax(logits.double(), -1)
