"""What the OpenAI API's requests may contain, and the calls that they make.

Unknown fields are refused by name. Fields of features that are not offered are accepted as long as
they ask for nothing, because client libraries send them so.
"""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from octavo.frontend.errors import RequestError, invalid, not_offered
from octavo.frontend.requests import ChatPrompt, GenerateCall, SamplingRequest

MAX_PROMPTS = 256  # of one completions request
DEFAULT_COMPLETION_TOKENS = 16

# These change nothing about the answer.
_HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
)
# Features that are not offered, with the values that do not ask for them.
_NOT_OFFERED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "continue_final_message": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Fields that go through to SamplingRequest under the same name when they are set.
_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "n",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "skip_special_tokens",
)


class StreamOptions(BaseModel):
    """What a stream reports beside the text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class OpenAIRequest(BaseModel):
    """The fields that both kinds of request have."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    best_of: int | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @classmethod
    def read(cls, body: bytes) -> Self:
        """The request in a JSON body. Raises RequestError."""
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            raise _explain(error) from error
        for name, value in (request.model_extra or {}).items():
            _check_extra(name, value)
        if request.stream_options is not None and not request.stream:
            raise invalid("stream_options", "needs stream to be true")
        if request.stream and (request.best_of or 0) > (1 if request.n is None else request.n):
            raise invalid("best_of", "above n cannot be streamed: the best are known at the end")
        return request

    @property
    def wants_usage(self) -> bool:
        """Whether the stream's last event reports usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every event of the stream reports usage."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, **more: Any) -> SamplingRequest:
        """The sampling parameters; `more` are those that the two kinds spell differently."""
        given = {name: value for name in _SCALARS if (value := getattr(self, name)) is not None}
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingRequest(
            logit_bias=_read_bias(self.logit_bias or {}),
            stop=tuple(stops),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop=bool(self.include_stop_str_in_output),
            early_stopping=_read_early_stopping(self.early_stopping),
            **{**given, **more},
        )


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    def calls(self) -> list[GenerateCall]:
        """One for each prompt. Raises RequestError."""
        prompts = self._prompts()
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise invalid("prompt", f"must have 1 to {MAX_PROMPTS} prompts, got {len(prompts)}")
        echoed = self.logprobs if self.echo else None
        sampling = self.sampling(logprobs=self.logprobs, prompt_logprobs=echoed)
        return [
            GenerateCall(
                prompt=prompt,
                sampling=sampling,
                echo=bool(self.echo),
                priority=self.priority or 0,
                cache_salt=self.cache_salt or "",
                add_special_tokens=self.add_special_tokens is not False,
                default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            )
            for prompt in prompts
        ]

    def _prompts(self) -> list[str | list[int]]:
        prompts: Any = self.prompt
        is_one = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
        return [prompts] if is_one else prompts


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def calls(self) -> list[GenerateCall]:
        """The one call that a chat makes. Raises RequestError."""
        more: dict[str, Any] = {"logprobs": self._logprobs()}
        if self.max_completion_tokens is not None:
            more["max_tokens"] = self.max_completion_tokens
        return [
            GenerateCall(
                prompt=ChatPrompt([_read_message(i, m) for i, m in enumerate(self.messages)]),
                sampling=self.sampling(**more),
                priority=self.priority or 0,
                cache_salt=self.cache_salt or "",
            )
        ]

    def _logprobs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise invalid("top_logprobs", "needs logprobs to be true")
            return None
        return self.top_logprobs or 0


def _explain(error: ValidationError) -> RequestError:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return RequestError("INVALID_ARGUMENT", f"the body is not valid JSON: {first['msg']}")
    field = str(first["loc"][0]) if first["loc"] else "body"
    return invalid(field, f"is not as it should be: {first['msg'].lower()}")


def _check_extra(name: str, value: Any) -> None:
    if name in _HARMLESS:
        return
    if name not in _NOT_OFFERED:
        raise RequestError("INVALID_ARGUMENT", f"the field {name!r:.200} is not known here", name)
    if value is not None and value not in _NOT_OFFERED[name]:
        raise not_offered(name)


def _read_early_stopping(value: bool | str | None) -> str:
    if isinstance(value, str) and value != "never":
        raise invalid("early_stopping", 'must be true, false or "never"')
    return value if isinstance(value, str) else str(bool(value)).lower()


def _read_bias(bias: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(key): value for key, value in bias.items()}
    except ValueError as error:
        raise invalid("logit_bias", "must have token ids as its keys") from error


def _read_message(index: int, message: Mapping[str, Any]) -> dict[str, str]:
    path = f"messages[{index}]"
    role = message.get("role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise not_offered(path, f"tools ({path})")
    if role not in _ROLES:
        raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": _read_content(f"{path}.content", message.get("content"))}


def _read_content(path: str, content: Any) -> str:
    """A text, or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(path, "must be a text or a list of text parts")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid(path, "must have parts with a type")
        if part["type"] != "text":
            raise not_offered(path, f"content of type {part['type']!r:.40} ({path})")
        if not isinstance(part.get("text"), str):
            raise invalid(path, "must have a text in each text part")
    return "".join(part["text"] for part in content)
