"""The bytes of a message: msgpack, checked against the message's dataclass.

A frame is the msgpack array ``[version, kind, field, field, ...]`` with the fields in the order in
which the dataclass declares them. Arrays of numbers travel as raw little-endian bytes. Nothing that
arrives is trusted: `unpack` raises `ProtocolError` for an unknown version or kind, a wrong number of
fields, a wrong type or a size over the field's limit, and names the field.

    @message("beat")
    class Beat(Message):
        incarnation: int
        requests: Int32s = limited(default_factory=int32s)
"""

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast, dataclass_transform

import msgpack
import numpy as np
import numpy.typing as npt

VERSION = 1

# Upper bounds that hold for every message; a field may set a lower one.
MAX_FRAME_BYTES = 64 << 20
MAX_ITEMS = 1 << 24
MAX_TEXT = 1 << 20

Int32s = Annotated[npt.NDArray[np.int32], "<i4"]
Float32s = Annotated[npt.NDArray[np.float32], "<f4"]

_Encode = Callable[[Any], Any]
_Decode = Callable[[Any, str], Any]
M = TypeVar("M", bound="Message")


class ProtocolError(ValueError):
    """Bytes that are not the message they should be. The text names the field, never its content."""


_NOTHING: tuple[()] = ()
_NO_INTS = np.zeros(0, dtype=np.int32)
_NO_INTS.flags.writeable = False  # shared by all messages that lack an array


def int32s(values: Any = _NOTHING) -> Int32s:
    """Any sequence of ints as int32 ``[n]``; a two-dimensional one is flattened row by row."""
    if values is _NOTHING:
        return _NO_INTS
    return np.ascontiguousarray(values, dtype=np.int32).reshape(-1)


def float32s(values: Any = ()) -> Float32s:
    """Any sequence of floats as float32 ``[n]``."""
    return np.ascontiguousarray(values, dtype=np.float32).reshape(-1)


def limited(limit: int = MAX_ITEMS, **kwargs: Any) -> Any:
    """A dataclass field for an array, list, text or bytes of at most `limit` items."""
    return dataclasses.field(metadata={"limit": limit}, **kwargs)


def bounded(low: float, high: float, **kwargs: Any) -> Any:
    """A dataclass field for a number in [low, high], or None where the type allows it."""
    return dataclasses.field(metadata={"bounds": (low, high)}, **kwargs)


# Bounds that many fields share.
COUNT = (0, (1 << 31) - 1)  # what is kept in 32 bits
INCARNATION = (0, (1 << 63) - 1)


class Message:
    """Base of all messages. Subclasses are dataclasses made by `message` or `part`."""

    KIND: ClassVar[str] = ""
    _encode: ClassVar[Callable[[Any], list[Any]]]
    _decoders: ClassVar[list[tuple[str, _Decode]]]
    _decode: ClassVar[Callable[[list[Any], str], Self]]

    def pack(self) -> bytes:
        """This message as one frame."""
        packed: bytes = msgpack.packb([VERSION, self.KIND, *self._fields()])  # type: ignore[no-untyped-call]
        return packed

    @classmethod
    def unpack(cls, frame: bytes) -> Self:
        """The message in `frame`. Raises ProtocolError if it is not one of this class."""
        return unpack(frame, cls)

    def to_bytes(self) -> bytes:
        """The fields alone, to travel as bytes inside a message."""
        packed: bytes = msgpack.packb(self._fields())  # type: ignore[no-untyped-call]
        return packed

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Self:
        """The inverse of `to_bytes`. Raises ProtocolError, which names `path`."""
        return cls._from_fields(_unpacked(data, path), path)

    def _fields(self) -> list[Any]:
        return type(self)._encode(self)

    @classmethod
    def _from_fields(cls, fields: Any, path: str) -> Self:
        if not isinstance(fields, list) or len(fields) != len(cls._decoders):
            raise ProtocolError(f"{path}: expected {len(cls._decoders)} fields")
        return cls._decode(fields, path)


def unpack(frame: bytes, *allowed: type[M]) -> M:
    """The message in `frame`, which must be one of the `allowed` classes.

    Raises:
        ProtocolError: the frame is too large, not msgpack, of another version, of a kind that is not
            allowed here, or does not fit the class.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame: {len(frame)} bytes exceed the limit of {MAX_FRAME_BYTES}")
    outer = _unpacked(frame, "frame")
    if not isinstance(outer, list) or len(outer) < 2:
        raise ProtocolError("frame: not an array of version, kind and fields")
    version, kind, *fields = outer
    if version != VERSION or isinstance(version, bool):
        raise ProtocolError(f"version: got {version!r:.20}, this process speaks {VERSION}")
    for cls in allowed:
        if kind == cls.KIND:
            return cls._from_fields(fields, kind)
    raise ProtocolError(f"kind: {kind!r:.40} is not expected here")


def all_below(ids: Int32s, limit: int) -> bool:
    """Whether all are in [0, limit)."""
    return not len(ids) or int(ids.view(np.uint32).max()) < limit  # negative ones are the largest


def _unpacked(data: bytes, path: str) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)  # type: ignore
    except Exception as error:  # msgpack raises many types; all mean the same here
        raise ProtocolError(f"{path}: not msgpack") from error


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field, limited, bounded))
def message(kind: str) -> Callable[[type[M]], type[M]]:
    """Makes a class a message that travels as a frame of its own."""

    def decorate(cls: type[M]) -> type[M]:
        made = part(cls)
        made.KIND = kind
        return made

    return decorate


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field, limited, bounded))
def part(cls: type[M]) -> type[M]:
    """Makes a class a dataclass that travels inside a message."""
    made = dataclasses.dataclass(kw_only=True)(cls)
    hints = typing.get_type_hints(made, include_extras=True)
    fields = dataclasses.fields(made)  # type: ignore[arg-type]
    made._encode = _list_of_fields({f.name: hints[f.name] for f in fields})
    made._decoders = [
        (f.name, _decoder(hints[f.name], f.metadata.get("limit"), f.metadata.get("bounds")))
        for f in fields
    ]
    plain = [None if "bounds" in f.metadata else _plain(hints[f.name]) for f in fields]
    made._decode = _object_of_fields(made, made._decoders, plain)
    return made


def _object_of_fields(
    cls: type[M], decoders: list[tuple[str, _Decode]], plain: list[str | None]
) -> Callable[..., M]:
    """One expression that makes the object from all fields, as `_list_of_fields`.

    Args:
        plain: for each field the expression of `_plain`.
    """
    names: dict[str, Any] = {f"d{index}": decode for index, (_, decode) in enumerate(decoders)}
    parts = []
    for i, ((name, _), test) in enumerate(zip(decoders, plain, strict=True)):
        call = f"d{i}(fields[{i}], path + '.{name}')"
        parts.append(f"{name}={call if test is None else test.format(i=i, call=call)}")
    code = f"lambda fields, path: cls({', '.join(parts)})"
    made: Callable[..., M] = eval(code, names | {"cls": cls, "no_ints": _NO_INTS})
    return made


def _plain(hint: Any) -> str | None:
    """The value of field `i` where that is plain to see, without the `call` that checks it: most
    arrays of most messages are empty, and every call costs as much as an array."""
    if typing.get_origin(hint) is types.UnionType:
        return "None if fields[{i}] is None else {call}"
    if hint == Int32s:
        return "no_ints if fields[{i}] == b'' else {call}"
    if hint in (int, float):
        return f"fields[{{i}}] if type(fields[{{i}}]) is {hint.__name__} else {{call}}"
    return None


def _list_of_fields(hints: dict[str, Any]) -> Callable[[Any], list[Any]]:
    """One expression that reads all fields: it is made once and runs for every message."""
    names: dict[str, Any] = {"no_ints": _NO_INTS, "ndarray": np.ndarray, "int32": _NO_INTS.dtype}
    parts = []
    for index, (name, hint) in enumerate(hints.items()):
        encode = _encoder(hint)
        names[f"e{index}"] = encode
        call = f"e{index}(m.{name})"
        if encode is _same:
            call = f"m.{name}"
        elif hint == Int32s:
            good = f"type(m.{name}) is ndarray and m.{name}.dtype is int32"
            call = f"b'' if m.{name} is no_ints else m.{name}.tobytes() if {good} else {call}"
        elif typing.get_origin(hint) is list:
            call = f"m.{name} and {call}"
        parts.append(call)
    made: Callable[[Any], list[Any]] = eval(f"lambda m: [{', '.join(parts)}]", names)
    return made


def _same(value: Any) -> Any:
    return value


def _array_encoder(dtype: np.dtype[Any]) -> _Encode:
    def encode(array: Any) -> bytes:
        if type(array) is not np.ndarray or array.dtype != dtype:
            array = np.ascontiguousarray(array, dtype=dtype)
        packed: bytes = array.tobytes()
        return packed

    return encode


def _encoder(hint: Any) -> _Encode:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _array_encoder(np.dtype(arguments[1]))
    if origin is list:
        one = _encoder(arguments[0])
        return _same if one is _same else lambda items: [one(item) for item in items]
    if origin is types.UnionType:
        some = _encoder(arguments[0])
        return _same if some is _same else lambda item: None if item is None else some(item)
    if isinstance(hint, type) and issubclass(hint, Message):
        return hint._encode
    return _same


def _decoder(hint: Any, limit: int | None, bounds: tuple[float, float] | None = None) -> _Decode:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _array_decoder(np.dtype(arguments[1]), limit or MAX_ITEMS)
    if origin is list:
        return _list_decoder(_decoder(arguments[0], None), limit or MAX_ITEMS)
    if origin is types.UnionType:  # always written `X | None`
        some = _decoder(arguments[0], limit, bounds)
        return lambda value, path: None if value is None else some(value, path)
    if isinstance(hint, type) and issubclass(hint, Message):
        return cast(_Decode, hint._from_fields)
    scalar = _scalar_decoder(hint, limit or MAX_TEXT)
    return scalar if bounds is None else _bounded_decoder(scalar, *bounds)


def _bounded_decoder(scalar: _Decode, low: float, high: float) -> _Decode:
    def decode(value: Any, path: str) -> Any:
        number = scalar(value, path)
        if not low <= number <= high:  # false for NaN too
            raise ProtocolError(f"{path}: not in [{low}, {high}]")
        return number

    return decode


def _array_decoder(dtype: np.dtype[Any], limit: int) -> _Decode:
    empty = np.frombuffer(b"", dtype=dtype)  # cannot be written to, and so can be shared

    def decode(value: Any, path: str) -> Any:
        if value == b"":
            return empty
        if not isinstance(value, bytes) or len(value) % dtype.itemsize:
            raise ProtocolError(f"{path}: not an array of {dtype.name}")
        if len(value) > limit * dtype.itemsize:
            raise ProtocolError(f"{path}: more than {limit} items")
        return np.frombuffer(value, dtype=dtype)

    return decode


def _list_decoder(one: _Decode, limit: int) -> _Decode:
    def decode(value: Any, path: str) -> Any:
        if not isinstance(value, list):
            raise ProtocolError(f"{path}: not a list")
        if len(value) > limit:
            raise ProtocolError(f"{path}: more than {limit} items")
        return [one(item, path) for item in value]

    return decode


def _scalar_decoder(hint: type, limit: int) -> _Decode:
    def decode(value: Any, path: str) -> Any:
        if hint is float and type(value) is int:
            return float(value)
        if type(value) is not hint:  # bool is no int here
            raise ProtocolError(f"{path}: expected {hint.__name__}, got {type(value).__name__}")
        if isinstance(value, str | bytes) and len(value) > limit:
            raise ProtocolError(f"{path}: longer than {limit}")
        return value

    return decode
