"""What a client asks for, whichever API it came through, before anything is checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ChatPrompt:
    """Messages for the model's chat template, each with `role` and `content`."""

    messages: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class SamplingRequest:
    """How to choose tokens; see SamplingParams in generation.proto for what each field takes."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: the gateway draws one
    max_tokens: int | None = None  # None: what the context has room for
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    use_beam_search: bool = False  # `n` is the width
    length_penalty: float = 1.0  # of beam search
    early_stopping: str = "false"  # of beam search: "true", "false" or "never"

    @property
    def num_samples(self) -> int:
        """How many are computed, from which the best `n` are returned."""
        return self.n if self.best_of is None else self.best_of


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: the prompt's once, the outputs' of all samples."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens that did not have to be computed
    completion_tokens: int


@dataclass(frozen=True)
class SampleSoFar:
    """What a client has already of a sample whose stream is continued."""

    tokens: Sequence[int]
    finish_reason: str = ""  # empty while unfinished


@dataclass(frozen=True)
class GenerateCall:
    """One prompt and how to go on from it."""

    prompt: str | Sequence[int] | ChatPrompt
    sampling: SamplingRequest = field(default_factory=SamplingRequest)
    echo: bool = False
    priority: int = 0
    cache_salt: str = ""
    add_special_tokens: bool = True  # text prompts only
    # The most tokens to generate where `max_tokens` is None and the context has room for more.
    default_max_tokens: int | None = None
    resume: Sequence[SampleSoFar] = ()  # of each sample, in order; empty: the stream begins here
