"""Chat templates."""

import dataclasses
import json
from pathlib import Path

import pytest
from shared_files import golden

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.frontend.chat import open_chat_template
from octavo.frontend.errors import RequestError


def test_golden_chats_render_exactly(demo: ModelFiles) -> None:
    template = open_chat_template(demo)
    assert template is not None
    chats = [line for line in golden("greedy") if line["kind"] == "chat"]
    assert len(chats) == 10
    for line in chats:
        assert template.render([{"role": "user", "content": line["prompt"]}]) == line["text"]


def with_template(model: ModelFiles, source: str) -> ModelFiles:
    return dataclasses.replace(model, gguf={**model.gguf, "tokenizer.chat_template": source})


def test_template_without_source_is_none(demo: ModelFiles) -> None:
    values = {k: v for k, v in demo.gguf.items() if k != "tokenizer.chat_template"}
    assert open_chat_template(dataclasses.replace(demo, gguf=values)) is None


def test_broken_template_is_a_model_error(demo: ModelFiles) -> None:
    with pytest.raises(ModelError, match="chat template is broken"):
        open_chat_template(with_template(demo, "{% for %}"))


def test_template_may_refuse_messages(demo: ModelFiles) -> None:
    template = open_chat_template(with_template(demo, "{{ raise_exception('roles must alternate') }}"))
    assert template is not None
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        template.render([])
    assert caught.value.code == "INVALID_ARGUMENT"
    assert caught.value.field == "messages"


def test_template_gets_tokens_json_and_loop_controls(demo: ModelFiles) -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{% endfor %}{{ eos_token }}"
    )
    template = open_chat_template(with_template(demo, source))
    assert template is not None
    text = template.render([{"role": "user", "content": "é<&>"}, {"role": "user", "content": "no"}])
    assert text == '<|im_start|>{"role": "user", "content": "é<&>"}<|im_end|>'


def test_template_cannot_reach_python(demo: ModelFiles) -> None:
    template = open_chat_template(with_template(demo, "{{ messages.__class__.__mro__ }}"))
    assert template is not None
    with pytest.raises(RequestError):
        template.render([])


def folder_model(path: Path) -> ModelFiles:
    return ModelFiles("m", path, "safetensors", {"vocab_size": 5}, (), "digest")


def test_folder_template_from_config(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    config = {"chat_template": named, "eos_token": {"content": "</s>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = open_chat_template(folder_model(tmp_path))
    assert template is not None
    assert template.render([]) == "</s>"


def test_folder_template_from_its_own_file_wins(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    (tmp_path / "chat_template.jinja").write_text("file")
    template = open_chat_template(folder_model(tmp_path))
    assert template is not None
    assert template.render([]) == "file"


def test_folder_without_template(tmp_path: Path) -> None:
    assert open_chat_template(folder_model(tmp_path)) is None
