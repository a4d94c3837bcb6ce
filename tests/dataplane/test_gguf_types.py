"""Tensors of every type of GGUF, through a file and our loader, beside the format's own library."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_types import KINDS, READ, stored

from octavo.common.modelfiles import ModelError, open_model
from octavo.dataplane.loading.gguf_blocks import KEPT
from octavo.dataplane.loading.grouped import GROUP, GroupedMatrix
from octavo.dataplane.loading.weights import Part, open_weights

SHAPE = (6, 512)
# Root mean square of what is lost, of values of the standard normal distribution. (Ternary types are
# for models that were trained so.)
LOSSES = {
    KINDS.F32: 0.0,
    KINDS.F16: 3e-4,
    KINDS.BF16: 2.5e-3,
    KINDS.Q8_0: 7e-3,
    KINDS.Q5_0: 0.05,
    KINDS.Q5_1: 0.05,
    KINDS.Q4_0: 0.1,
    KINDS.Q4_1: 0.1,
    KINDS.MXFP4: 0.15,
}


def name_of(kind: KINDS) -> str:
    return f"model.layers.{READ.index(kind)}.mlp.up_proj.weight"


def own_name_of(kind: KINDS) -> str:
    return f"blk.{READ.index(kind)}.ffn_up.weight"


def values_of(kind: KINDS) -> np.ndarray:
    values = np.random.default_rng(int(kind)).standard_normal(SHAPE).astype(np.float32)
    values[2, :64], values[4, 32:] = -0.75, 0.0  # groups without a range
    return values


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with one matrix of each type."""
    return write(
        tmp_path_factory.mktemp("gguf") / "types.gguf",
        {kind: stored(values_of(kind), kind) for kind in READ},
    )


def write(path: Path, tensors: dict[KINDS, np.ndarray]) -> Path:
    """A file with these bytes of rows, and as much else as opening a model needs."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(len(READ))
    writer.add_context_length(64)
    writer.add_token_list(["<0>", "<1>"])
    for kind, rows in tensors.items():
        writer.add_tensor(own_name_of(kind), rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def wanted(path: Path) -> dict[str, np.ndarray]:
    """What the library reads and dequantises."""
    tensors = gguf.GGUFReader(path).tensors
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in tensors}


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.name)
def test_plain_values(path: Path, wanted: dict[str, np.ndarray], kind: KINDS) -> None:
    taken = open_weights(open_model(str(path)), torch.float32).take(name_of(kind), SHAPE).numpy()
    assert np.isfinite(taken).all()
    assert taken.std() > 1e-3
    np.testing.assert_array_equal(taken, wanted[own_name_of(kind)])
    if kind in LOSSES:
        loss = np.sqrt(np.mean((taken - values_of(kind)) ** 2))
        assert LOSSES[kind] / 4 <= loss <= LOSSES[kind]


@pytest.mark.parametrize("packing", ["none", "exact4"])
@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.name)
def test_parts(path: Path, wanted: dict[str, np.ndarray], kind: KINDS, packing: str) -> None:
    """Rows, and columns in whole blocks and across them, as the ranks of a gang read them."""
    weights = open_weights(open_model(str(path)), torch.float32, packing)
    values = wanted[own_name_of(kind)]
    for begin, end in ((256, 512), (0, 256), (100, 300)):
        part = Part(rows=(range(1), range(2, 5)), columns=(range(begin, end),))
        taken = weights.take_matrix(name_of(kind), SHAPE, part)
        found = taken.values() if isinstance(taken, GroupedMatrix) else taken.numpy()
        own = np.concatenate((values[:1], values[2:5]))[:, begin:end]
        np.testing.assert_allclose(found, own, rtol=0, atol=2e-7 * np.abs(values).max())


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.name)
def test_kept_integers(path: Path, wanted: dict[str, np.ndarray], kind: KINDS) -> None:
    """Types that have them give the same values but for the rounding of one float32 operation."""
    weights = open_weights(open_model(str(path)), torch.float32, "exact4")
    matrix, values = weights.take_matrix(name_of(kind), SHAPE), wanted[own_name_of(kind)]
    if kind not in KEPT:
        assert isinstance(matrix, torch.Tensor)
        np.testing.assert_array_equal(matrix.numpy(), values)
        return
    assert isinstance(matrix, GroupedMatrix)
    assert matrix.shape == SHAPE
    assert matrix.bits == (4 if "Q4" in kind.name else 8)
    np.testing.assert_allclose(matrix.values(), values, rtol=0, atol=2e-7 * np.abs(values).max())
    order = np.random.default_rng(0).permutation(SHAPE[0])
    np.testing.assert_array_equal(matrix.rows(order).values(), matrix.values()[order])


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.name)
def test_rounded_to_int8(path: Path, wanted: dict[str, np.ndarray], kind: KINDS) -> None:
    weights = open_weights(open_model(str(path)), torch.float32, "int8")
    matrix, values = weights.take_matrix(name_of(kind), SHAPE), wanted[own_name_of(kind)]
    assert isinstance(matrix, GroupedMatrix)
    groups = values.reshape(-1, GROUP)
    steps = np.abs(groups).max(axis=-1, keepdims=True) / 127
    assert (np.abs(matrix.values().reshape(groups.shape) - groups) <= 0.5001 * steps).all()


def with_type(path: Path, kind: KINDS, new: int, copy: Path) -> str:
    """A copy in which the matrix of a type claims to be of another."""
    whole = bytearray(path.read_bytes())
    name = own_name_of(kind).encode()
    place = whole.index(name) + len(name) + struct.calcsize("<IQQ")
    assert whole[place : place + 4] == struct.pack("<I", kind)
    whole[place : place + 4] = struct.pack("<I", new)
    copy.write_bytes(whole)
    return str(copy)


@pytest.mark.parametrize("packing", ["none", "exact4", "int8"])
@pytest.mark.parametrize(
    ("kind", "new", "message"),
    [
        (KINDS.F16, 99, "is of type 99, which is not known"),
        (KINDS.F16, 4, "is of type 4, which is not known"),  # Q4_2, long gone
        (KINDS.F32, KINDS.I32, "is quantised as I32, which is not supported"),
        (KINDS.F32, KINDS.Q8_1, "is quantised as Q8_1, which is not supported"),
    ],
)
def test_other_types_are_refused(
    path: Path, tmp_path: Path, kind: KINDS, new: int, message: str, packing: str
) -> None:
    files = open_model(with_type(path, kind, new, tmp_path / "odd.gguf"))
    weights = open_weights(files, torch.float32, packing)
    with pytest.raises(ModelError, match=rf"odd\.gguf: tensor {own_name_of(kind)} {message}"):
        weights.take_matrix(name_of(kind), SHAPE)
    other = KINDS.Q8_0  # of the same file, unharmed
    assert weights.take(name_of(other), SHAPE).shape == SHAPE


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    short = stored(np.zeros((2, 128), np.float32), KINDS.F32)
    path = write(tmp_path / "short.gguf", {KINDS.F32: short})
    files = open_model(with_type(path, KINDS.F32, KINDS.Q4_K, tmp_path / "odd.gguf"))
    message = rf"tensor {own_name_of(KINDS.F32)} has rows of 128 values, which are stored 256 together"
    for packing in ("none", "exact4"):
        with pytest.raises(ModelError, match=message):
            open_weights(files, torch.float32, packing).take_matrix(name_of(KINDS.F32), (2, 128))
