"""A tiny Llama with random weights, and what Hugging Face says about it."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 300


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Two layers, four heads over two KV heads, logits far enough apart for greedy decoding."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    torch.manual_seed(11)
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    model.train(False)
    return model


def save_tiny_llama(model: LlamaForCausalLM, folder: Path, **options: Any) -> Path:
    """Saves it as a folder of safetensors."""
    model.save_pretrained(folder, **options)
    return folder


@torch.no_grad()
def hf_logits(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Raw logits at every position: ``[num_tokens, vocab_size]``."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits
    return logits[0].float()


def hf_greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    """The next `count` tokens by argmax; EOS goes on. Asserts that no decision is close."""
    tokens = list(prompt)
    for _ in range(count):
        best = hf_logits(model, tokens)[-1].topk(2)
        assert float(best.values[0] - best.values[1]) > 1e-3, "choose another prompt"
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()
