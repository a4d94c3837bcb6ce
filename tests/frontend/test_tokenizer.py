"""Text to tokens and back, for the demo model and for folders of Hugging Face."""

import dataclasses
from pathlib import Path

import pytest
import tokenizers
from shared_files import golden
from tokenizers import AddedToken, decoders, models, normalizers

from octavo.common.modelfiles import ModelError, ModelFiles
from octavo.frontend.tokenizer import Tokenizer, open_tokenizer


def test_golden_prompts_tokenize_exactly(tokenizer: Tokenizer) -> None:
    lines = golden("greedy")
    assert len(lines) == 20
    for line in lines:
        assert tokenizer.encode(line["text"]) == line["prompt_token_ids"]


def test_golden_outputs_detokenize_exactly(tokenizer: Tokenizer) -> None:
    for line in golden("greedy"):
        assert tokenizer.decode(line["output_token_ids"], True) == line["output_text"]


@pytest.mark.parametrize(
    "text",
    [
        "don't  stop\n\n\tnow   ",
        "1234567890 ٣٤ ½",
        "naïve café — “quotes”",
        "👩‍👩‍👧‍👦 🇫🇷 ✊🏿",
        "東京は日本の首都",
        "<|im_start|>user\nhi<|im_end|>",
        " leading and trailing ",
    ],
)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("31415")) == 5


def test_special_tokens_in_text_are_special(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.decode([2, 28120], skip_special_tokens=True) == "hello"


def test_no_token_is_longer_than_announced(tokenizer: Tokenizer) -> None:
    lengths = [len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size)]
    assert max(lengths) == tokenizer.max_token_chars


def test_unknown_pre_tokenizer_is_refused(demo: ModelFiles) -> None:
    other = dataclasses.replace(demo, gguf={**demo.gguf, "tokenizer.ggml.pre": "klingon"})
    with pytest.raises(ModelError, match=r"klingon.*not supported.*smollm"):
        open_tokenizer(other)


def test_unknown_kind_is_refused(demo: ModelFiles) -> None:
    other = dataclasses.replace(demo, gguf={**demo.gguf, "tokenizer.ggml.model": "bert"})
    with pytest.raises(ModelError, match="bert"):
        open_tokenizer(other)


def test_bos_is_added_where_the_file_says_so(demo: ModelFiles) -> None:
    other = dataclasses.replace(demo, gguf={**demo.gguf, "tokenizer.ggml.add_bos_token": True})
    tokenizer = open_tokenizer(other)
    ids = tokenizer.encode("hello")
    assert ids == [1, 28120]
    assert tokenizer.encode("hello", add_special_tokens=False) == [28120]
    assert tokenizer.added_prefix(ids, "hello") == 1
    assert tokenizer.added_prefix([1, 28120], "<|im_start|>hello") == 0


def folder(path: Path, backend: tokenizers.Tokenizer, vocab_size: int) -> ModelFiles:
    backend.save(str(path / "tokenizer.json"))
    return ModelFiles("m", path, "safetensors", {"vocab_size": vocab_size}, (2,), "digest")


def sentencepiece() -> tokenizers.Tokenizer:
    """A tiny tokenizer of the kind that Llama 2 has."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    for token in ("▁", "h", "i", "▁h", "▁hi"):
        vocab[token] = len(vocab)
    merges = [("▁", "h"), ("▁h", "i")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return backend


def test_folder_with_sentencepiece_tokens(tmp_path: Path) -> None:
    backend = sentencepiece()
    tokenizer = open_tokenizer(folder(tmp_path, backend, vocab_size=300))
    for text in ("hi hi", "hi é 🙂 hi", " hi"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == backend.decode(ids) == text
    assert tokenizer.vocab_size == 300  # ids that only the model has stand for nothing
    assert tokenizer.decode([299]) == ""


def test_folder_with_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    model = folder(tmp_path, sentencepiece(), vocab_size=260)
    with pytest.raises(ModelError, match=r"tokenizer\.json has .* id 263.* `vocab_size` is 260"):
        open_tokenizer(model)


def test_folder_with_an_added_token_beyond_the_model_is_taken(tmp_path: Path) -> None:
    """Some are published so, with tokens for images beside a model of text."""
    backend = sentencepiece()
    backend.add_special_tokens([AddedToken("<image>", special=True)])
    tokenizer = open_tokenizer(folder(tmp_path, backend, vocab_size=264))
    assert tokenizer.encode("<image>") == [264]


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    model = ModelFiles("m", tmp_path, "safetensors", {"vocab_size": 5}, (), "digest")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        open_tokenizer(model)


def test_unknown_decoder_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece is not supported"):
        open_tokenizer(folder(tmp_path, backend, 1))
