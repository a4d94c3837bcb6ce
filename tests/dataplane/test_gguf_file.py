"""Reading GGUF files: the same as the format's own library, and no crash on broken ones."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_gguf import Q8_0, write_gguf
from transformers import LlamaForCausalLM

from octavo.common.gguf_file import GgufError, GgufFile
from octavo.common.modelfiles import ModelError, open_model


@pytest.fixture(scope="module")
def path(hf_model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(hf_model, tmp_path_factory.mktemp("gguf") / "tiny.gguf", {"ffn": Q8_0})


def check_like_the_library(path: Path) -> None:
    file, wanted = GgufFile(path), gguf.GGUFReader(path)
    values = {key: field.contents() for key, field in wanted.fields.items()}
    assert file.values == {key: v for key, v in values.items() if not key.startswith("GGUF.")}
    assert file.data_offset == wanted.data_offset
    assert list(file.tensors) == [tensor.name for tensor in wanted.tensors]
    for tensor in wanted.tensors:
        mine = file.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.kind == tensor.tensor_type
        assert bytes(file.data(mine, int(tensor.n_bytes))) == tensor.data.tobytes()


def test_a_model_reads_like_with_the_library(path: Path) -> None:
    check_like_the_library(path)


def test_values_of_every_type(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 1 << 63)
    writer.add_int64("i64", -(1 << 62))
    writer.add_float32("f32", 1.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("bool", True)
    writer.add_string("string", "naïve ✓")
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, -0.25])
    writer.add_array("strings", ["a", "", "é"])
    writer.add_custom_alignment(64)
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check_like_the_library(path)


def test_a_file_cut_anywhere_is_refused(path: Path, tmp_path: Path) -> None:
    whole, header = path.read_bytes(), GgufFile(path).data_offset
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 8, 15, 24, *range(30, header - 64, 173)]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf is not a readable GGUF file"):
            open_model(str(cut))
    cut.write_bytes(whole[:header])
    file = GgufFile(cut)
    with pytest.raises(GgufError, match=r"ends at byte \d+ of"):
        file.data(file.tensors["output.weight"], 300 * 32 * 4)


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (0, b"GGML", "does not start with GGUF"),
        (4, b"\x01\0\0\0", "version 1 is not supported"),
        (4, b"\0\0\0\x03", "version 50331648"),  # a file of the other byte order
        (8, b"\xff" * 8, "is wanted of"),
        (16, b"\xff" * 8, "is wanted of|not known|not UTF-8"),
        (24, b"\xff" * 8, "is wanted of"),
        (32, b"\xff\xff", "not UTF-8"),
    ],
)
def test_broken_headers_are_refused(
    path: Path, tmp_path: Path, at: int, new: bytes, message: str
) -> None:
    broken = bytearray(path.read_bytes())
    broken[at : at + len(new)] = new
    copy = tmp_path / "broken.gguf"
    copy.write_bytes(broken)
    with pytest.raises(ModelError, match=message):
        open_model(str(copy))
