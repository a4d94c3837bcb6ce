"""Messages survive the wire; anything else is refused with the field's name."""

import typing

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.proto import plan as plan_messages
from octavo.proto import session as session_messages
from octavo.proto.plan import Admit, Admits, DrawLogprobs, Plan, PromptLogprobs, Result, Sampling
from octavo.proto.session import Failure, Finish, Finishes, Submit, Tokens
from octavo.proto.wire import (
    COUNT,
    MAX_FRAME_BYTES,
    VERSION,
    Message,
    ProtocolError,
    bounded,
    float32s,
    int32s,
    part,
    unpack,
)

ALL = [
    value
    for module in (plan_messages, session_messages)
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, Message) and value.KIND
]


def example_plan() -> Plan:
    admit = Admit(
        slot=1,
        tokens=int32s([5, 6, 7]),
        prompt_len=2,
        computed=0,
        blocks=int32s([3]),
        sample=0,
        sampling=Sampling(temperature=0.5, seed=2**64 - 1, bias_ids=int32s([1]), bias_values=[0.5]),
    )
    return Plan(
        epoch=9,
        number=4,
        copies=int32s([1, 2]),
        admits=Admits.of([admit]),
        forks=int32s([1, 2, 1]),
        table_slots=int32s([1]),
        table_indices=int32s([1]),
        table_blocks=int32s([4]),
        decode_slots=int32s([0]),
        chunk_slots=int32s([1]),
        chunk_lengths=int32s([3]),
        draw_slots=int32s([1, 2]),
        draw_chunks=int32s([0, 0]),
    )


def equal(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)  # type: ignore[arg-type]
    if isinstance(left, Message | Admit):
        return type(left) is type(right) and all(
            equal(value, getattr(right, name)) for name, value in vars(left).items()
        )
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))  # type: ignore[arg-type]
    return left == right


def test_a_plan_survives_the_wire() -> None:
    plan = example_plan()
    assert equal(Plan.unpack(plan.pack()), plan)


def test_tokens_and_results_survive_the_wire() -> None:
    scores = DrawLogprobs(draws=int32s([0]), logprobs=float32s([-1.5]), top_counts=int32s([0]))
    result = Result(
        epoch=1,
        number=2,
        rank=0,
        tokens=int32s([7]),
        draw_logprobs=scores,
        prompt_logprobs=[PromptLogprobs(chunk=0, start=1, logprobs=float32s([-0.25]))],
    )
    assert equal(Result.unpack(result.pack()), result)
    finish = Finish(request=1, attempt=0, sample=0, reason="stop", stop_token=2)
    tokens = Tokens(
        controlplane=3, requests=int32s([1]), tokens=int32s([2]), finishes=Finishes.of([finish])
    )
    assert equal(Tokens.unpack(tokens.pack()), tokens)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("samples", int32s(), "the columns differ in length"),
        ("scores", [], "the columns differ in length"),
        ("reasons", int32s([2]), r"reasons: not in \[0, 2\)"),
        ("reasons", int32s([-1]), r"reasons: not in \[0, 2\)"),
    ],
)
def test_finishes_that_do_not_fit_are_refused(column: str, value: object, message: str) -> None:
    finishes = Finishes.of([Finish(request=1, attempt=0, sample=0, reason="length")])
    finishes.validate()
    setattr(finishes, column, value)
    with pytest.raises(ProtocolError, match=message):
        finishes.validate()


def test_finishes_come_out_as_they_went_in() -> None:
    endings = [
        Finish(request=3, attempt=1, sample=2, reason="stop", stop_token=7),
        Finish(request=1, attempt=0, sample=0, reason="length", score=-0.5),
    ]
    tokens = Tokens.unpack(Tokens(controlplane=1, finishes=Finishes.of(endings)).pack())
    assert list(tokens.finishes) == endings
    assert list(Tokens(controlplane=1).finishes) == []


def test_arrays_travel_as_little_endian_int32() -> None:
    frame = Plan(epoch=1, number=0, decode_slots=int32s([1, 256])).pack()
    assert b"\x01\x00\x00\x00\x00\x01\x00\x00" in frame


def test_every_kind_has_one_name() -> None:
    assert len({cls.KIND for cls in ALL}) == len(ALL) > 15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: [VERSION + 1, *f[1:]], "version"),
        (lambda f: [True, *f[1:]], "version"),
        (lambda f: [f[0], "plam", *f[2:]], "kind"),
        (lambda f: f[:-1], "expected 18 fields"),
        (lambda f: [*f, 0], "expected 18 fields"),
        (lambda f: [*f[:2], "1", *f[3:]], r"plan\.epoch: expected int, got str"),
        (lambda f: [*f[:2], True, *f[3:]], r"plan\.epoch: expected int, got bool"),
        (lambda f: [*f[:4], b"abc", *f[5:]], r"plan\.swap_out: not an array of int32"),
        (lambda f: [*f[:8], 7, *f[9:]], r"plan\.admits: expected 10 fields"),
        (lambda f: [*f[:8], [1], *f[9:]], r"plan\.admits: expected 10 fields"),
    ],
)
def test_what_is_not_a_plan_is_refused(change: typing.Any, message: str) -> None:
    fields = msgpack.unpackb(example_plan().pack())
    with pytest.raises(ProtocolError, match=message):
        Plan.unpack(msgpack.packb(change(fields)))


def test_frames_over_the_limit_are_refused() -> None:
    with pytest.raises(ProtocolError, match="exceed the limit"):
        Plan.unpack(bytes(MAX_FRAME_BYTES + 1))


def test_fields_over_their_limit_are_refused() -> None:
    failure = Failure(controlplane=1, request=1, attempt=0, code="x" * 33, reason="")
    with pytest.raises(ProtocolError, match=r"code: longer than 32"):
        Failure.unpack(failure.pack())
    sampling = Sampling(bias_ids=int32s(range(4097)))
    fields = msgpack.unpackb(example_plan().pack())
    fields[8][8] = [sampling.packed]
    plan = Plan.unpack(msgpack.packb(fields))
    with pytest.raises(ProtocolError, match=r"samplings\.bias_ids: more than 4096 items"):
        list(plan.admits)
    plan.admits.samplings = [b"\xc1"]
    with pytest.raises(ProtocolError, match=r"samplings: not msgpack"):
        list(plan.admits)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("copies", [1], "not pairs"),
        ("copies", [1, 8], r"not in \[0, 8\)"),
        ("forks", [1, 2], "not triples"),
        ("table_blocks", [-1], "table_blocks"),
        ("table_blocks", [1, 2], "not as long"),
        ("decode_slots", [4], "decode_slots"),
        ("chunk_lengths", [1, 1], "not as long"),
        ("draw_chunks", [1, 0], "draw_chunks"),
        ("swap_out", [0, 0], "swap_out"),
    ],
)
def test_a_plan_with_ids_out_of_range_is_refused(field: str, value: list[int], message: str) -> None:
    plan = example_plan()
    plan.validate(num_slots=4, num_blocks=8, num_cpu_blocks=0)
    setattr(plan, field, int32s(value))
    with pytest.raises(ProtocolError, match=message):
        plan.validate(num_slots=4, num_blocks=8, num_cpu_blocks=0)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("slots", [4], r"admits\.slots: an id is not in \[0, 4\)"),
        ("blocks", [-1], r"admits\.blocks: an id is not in \[0, 8\)"),
        ("samples", [], r"admits: the columns differ in length"),
        ("samplings", [], r"admits: the columns differ in length"),
        ("token_counts", [2], r"admits\.token_counts"),
        ("block_counts", [2], r"admits\.block_counts"),
        ("block_counts", [-1], r"admits\.block_counts"),
    ],
)
def test_admissions_that_do_not_fit_are_refused(column: str, value: list[int], message: str) -> None:
    plan = example_plan()
    plan.validate(4, 8, 8)
    setattr(plan.admits, column, value if column == "samplings" else int32s(value))
    with pytest.raises(ProtocolError, match=message):
        plan.validate(4, 8, 8)


def test_admissions_come_out_as_they_went_in() -> None:
    admits = [
        Admit(
            slot=slot,
            tokens=int32s(range(slot + 1)),
            prompt_len=slot,
            computed=slot // 2,
            blocks=int32s([5] * slot),
            sample=slot,
            sampling=Sampling(seed=slot),
            prompt_logprobs_from=7 - slot,
        )
        for slot in (3, 0, 2)
    ]
    plan = Plan.unpack(Plan(epoch=1, number=0, admits=Admits.of(admits)).pack())
    plan.validate(4, 8, 8)
    assert len(plan.admits) == 3
    assert all(equal(out, admit) for out, admit in zip(plan.admits, admits, strict=True))
    assert list(Plan(epoch=1, number=0).admits) == []


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(data, *ALL)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_a_mutated_frame_is_refused_or_still_a_message(data: st.DataObject) -> None:
    frame = bytearray(data.draw(st.sampled_from([example_plan().pack(), _submit().pack()])))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = unpack(bytes(frame), Plan, Submit)
    except ProtocolError:
        return
    assert isinstance(message, Plan | Submit)


def _submit() -> Submit:
    return Submit(
        gateway=1,
        request=1,
        attempt=0,
        arrival=1.5,
        priority=0,
        prompt=int32s([1, 2, 3]),
        samples=[session_messages.SampleState()],
        max_tokens=4,
        sampling=Sampling(),
    )


@part
class Bounds(Message):
    count: int = bounded(*COUNT)
    share: float | None = bounded(0.0, 1.0, default=None)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ([-1, None], "bounds.count"),
        ([1 << 31, None], "bounds.count"),
        ([1, 1.5], "bounds.share"),
        ([1, float("nan")], "bounds.share"),
        ([1, True], "bounds.share"),
    ],
)
def test_numbers_out_of_their_bounds_are_refused(fields: list[object], problem: str) -> None:
    frame = msgpack.packb(fields)
    assert Bounds.from_bytes(msgpack.packb([(1 << 31) - 1, 1]), "bounds").share == 1.0
    with pytest.raises(ProtocolError, match=problem):
        Bounds.from_bytes(frame, "bounds")
