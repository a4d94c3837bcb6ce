"""Chat messages to one prompt text, with the model's own template."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.frontend.errors import RequestError, invalid


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    template: jinja2.Template
    special_tokens: Mapping[str, str]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, up to where the assistant's answer begins.

        Raises:
            RequestError: the template does not take these messages.
        """
        try:
            return self.template.render(
                messages=messages, add_generation_prompt=True, **self.special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise invalid("messages", f"do not fit the model's chat template: {error}") from error


def open_chat_template(model: ModelFiles) -> ChatTemplate | None:
    """The model's chat template, None where it has none. Raises ModelError if it is broken."""
    source, tokens = _gguf_source(model) if model.format == "gguf" else _folder_source(model.path)
    if source is None:
        return None
    try:
        return ChatTemplate(_environment().from_string(source), tokens)
    except jinja2.TemplateError as error:
        raise ModelError(f"{model.path}: the chat template is broken: {error}") from error


def no_template() -> RequestError:
    """The error for chat messages sent to a model without a template."""
    return invalid("messages", "cannot be used: this model has no chat template; send a prompt")


def _environment() -> jinja2.Environment:
    """What Hugging Face's templates expect to find; the sandbox keeps them from anything else."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _gguf_source(model: ModelFiles) -> tuple[str | None, dict[str, str]]:
    tokens = model.gguf.get("tokenizer.ggml.tokens", ())
    special = {}
    for name in ("bos", "eos", "unk", "pad"):
        key = {"unk": "unknown", "pad": "padding"}.get(name, name)
        token_id = model.gguf.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    return model.gguf.get("tokenizer.chat_template"), special


def _folder_source(path: Path) -> tuple[str | None, dict[str, str]]:
    config_path, template_path = path / "tokenizer_config.json", path / "chat_template.jinja"
    config = json.loads(config_path.read_text()) if config_path.exists() else {}
    special = {name: _content(config[name]) for name in config if name.endswith("_token")}
    source = template_path.read_text() if template_path.exists() else config.get("chat_template")
    return _default_template(source), {k: v for k, v in special.items() if v is not None}


def _content(token: Any) -> str | None:
    """A special token is written as its text or as an object that holds it."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _default_template(source: Any) -> str | None:
    """Some models have several named templates; the one for plain chat is called default."""
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        return named.get("default")
    return source if isinstance(source, str) else None
