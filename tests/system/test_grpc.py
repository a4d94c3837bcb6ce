"""The gRPC service as clients see it: with our stubs, with none of ours, and with our own client."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from service import Service, wait_for
from shared_files import golden

from octavo.frontend.client import Client, ClientError
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc

pytestmark = pytest.mark.system

RAW = golden("greedy")[1]
CHAT = next(line for line in golden("greedy") if line["kind"] == "chat")
SERVICE = "octavo.v1.Generation"
TIMEOUT = 60.0


@pytest.fixture(scope="module")
def channel(service: Service) -> Iterator[Any]:
    with grpc.insecure_channel(service.target) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: Any) -> Any:
    return pb_grpc.GenerationStub(channel)


def request(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=RAW["text"], sampling=pb.SamplingParams(**sampling))


# -- the stream's form ------------------------------------------------------------------------------


def test_the_stream_s_first_and_last_messages(stub: Any) -> None:
    messages = list(stub.Generate(request(seed=4, n=2, max_tokens=5), timeout=TIMEOUT))
    assert list(messages[0].prompt_token_ids) == RAW["prompt_token_ids"]
    assert messages[0].seed == 4
    assert not any(message.prompt_token_ids for message in messages[1:])
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]
    assert messages[-1].usage.prompt_tokens == len(RAW["prompt_token_ids"])
    for index in (0, 1):
        mine = [message for message in messages if message.index == index]
        assert [bool(message.finish_reason) for message in mine] == [False] * (len(mine) - 1) + [True]


def test_a_drawn_seed_is_told_and_repeats_the_answer(stub: Any) -> None:
    first = stub.GenerateUnary(request(max_tokens=6), timeout=TIMEOUT)
    again = stub.GenerateUnary(request(max_tokens=6, seed=first.seed), timeout=TIMEOUT)
    assert again.choices[0].token_ids == first.choices[0].token_ids


def test_chat_prompt(stub: Any) -> None:
    message = pb.ChatMessage(role="user", content=CHAT["prompt"])
    asked = pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[message]),
        sampling=pb.SamplingParams(temperature=0, max_tokens=8),
    )
    reply = stub.GenerateUnary(asked, timeout=TIMEOUT)
    assert list(reply.prompt_token_ids) == CHAT["prompt_token_ids"]
    assert list(reply.choices[0].token_ids) == CHAT["output_token_ids"][:8]


# -- the other calls --------------------------------------------------------------------------------


def test_tokenize_and_detokenize(stub: Any) -> None:
    reply = stub.Tokenize(pb.TokenizeRequest(text=RAW["text"]), timeout=TIMEOUT)
    assert list(reply.token_ids) == RAW["prompt_token_ids"]
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=CHAT["prompt"])])
    reply = stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=TIMEOUT)
    assert list(reply.token_ids) == CHAT["prompt_token_ids"]
    ids = [2, *RAW["output_token_ids"]]
    whole = stub.Detokenize(pb.DetokenizeRequest(token_ids=ids), timeout=TIMEOUT)
    assert whole.text == "<|im_end|>" + RAW["output_text"]
    skipping = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=True)
    assert stub.Detokenize(skipping, timeout=TIMEOUT).text == RAW["output_text"]


def test_model_and_server_info(stub: Any) -> None:
    model = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT)
    assert (model.name, model.family) == ("SmolLM2-135M-Instruct", "llama")
    assert (model.vocab_size, model.max_model_len, list(model.eos_token_ids)) == (49152, 8192, [2])
    assert model.has_chat_template
    server = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT)
    assert server.ready
    pool = server.gangs[0].device_pool
    counted = pool.free_blocks + pool.cached_blocks + pool.pinned_blocks + pool.used_blocks
    assert counted == pool.total_blocks > 0


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "code", "named"),
    [
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "prompt"),
        (pb.GenerateRequest(text="x", model="gpt-9"), "NOT_FOUND", "gpt-9"),
        (pb.GenerateRequest(text="x", cache_salt="s" * 257), "INVALID_ARGUMENT", "cache_salt"),
        (pb.GenerateRequest(text="x", resume=pb.ResumeFrom()), "INVALID_ARGUMENT", "resume.samples"),
        (
            pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="x")])),
            "INVALID_ARGUMENT",
            "role",
        ),
        (pb.GenerateRequest(chat=pb.ChatPrompt()), "INVALID_ARGUMENT", "messages"),
        (request(use_beam_search=True, n=2, logprobs=1), "INVALID_ARGUMENT", "logprobs"),
        (request(length_penalty=2.0), "INVALID_ARGUMENT", "length_penalty"),
        (request(n=3, best_of=2), "INVALID_ARGUMENT", "best_of"),
        (request(temperature=float("nan")), "INVALID_ARGUMENT", "temperature"),
    ],
)
def test_errors_are_status_codes_that_name_the_field(
    stub: Any, asked: pb.GenerateRequest, code: str, named: str
) -> None:
    for method in (stub.GenerateUnary, lambda *a, **k: list(stub.Generate(*a, **k))):
        with pytest.raises(grpc.RpcError) as caught:
            method(asked, timeout=TIMEOUT)
        assert caught.value.code().name == code
        assert named in caught.value.details()


def test_prefixes_are_registered_listed_and_given_up(stub: Any) -> None:
    server = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT)
    size = server.gangs[0].block_size
    ids = pb.TokenIds(ids=range(500, 500 + 2 * size + 6))  # two blocks, and six tokens more
    reply = stub.RegisterPrefix(pb.RegisterPrefixRequest(name="a", token_ids=ids), timeout=TIMEOUT)
    assert (reply.pinned_tokens, reply.pinned_blocks) == (2 * size, 2)
    listed = stub.ListPrefixes(pb.ListPrefixesRequest(), timeout=TIMEOUT).prefixes
    assert [(prefix.name, prefix.pinned_blocks) for prefix in listed] == [("a", 2)]
    stub.UnregisterPrefix(pb.UnregisterPrefixRequest(name="a"), timeout=TIMEOUT)
    with pytest.raises(grpc.RpcError) as caught:
        stub.UnregisterPrefix(pb.UnregisterPrefixRequest(name="a"), timeout=TIMEOUT)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as caught:
        stub.RegisterPrefix(pb.RegisterPrefixRequest(name="b", text="short"), timeout=TIMEOUT)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"block of {size}" in caught.value.details()


def test_other_calls_check_their_fields(stub: Any) -> None:
    with pytest.raises(grpc.RpcError, match="token_ids has token id 49152"):
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[49152]), timeout=TIMEOUT)
    with pytest.raises(grpc.RpcError, match="role"):
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="x")])
        stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=TIMEOUT)


# -- cancelling -------------------------------------------------------------------------------------


def test_cancel_in_mid_stream_frees_within_two_plans(stub: Any, service: Service) -> None:
    freed = service.metrics()["octavo_cancels_freed_total"]
    call = stub.Generate(request(max_tokens=2000, ignore_eos=True), timeout=TIMEOUT)
    next(call)
    next(call)
    call.cancel()
    wait_for(
        lambda: service.metrics()["octavo_cancels_freed_total"] == freed + 1, "its slots are freed", 30
    )
    assert service.metrics()["octavo_cancel_to_free_plans_max"] <= 2


def test_a_deadline_in_mid_stream(stub: Any, service: Service) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request(max_tokens=2000, ignore_eos=True), timeout=1.5))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    service.wait_until_idle()


# -- health and reflection --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", SERVICE])
def test_health(channel: Any, name: str) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def reflect(channel: Any, **asked: str) -> Any:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = iter([reflection_pb2.ServerReflectionRequest(**asked)])
    return next(stub.ServerReflectionInfo(requests, timeout=TIMEOUT))


def test_a_generic_client_finds_and_calls_generate(channel: Any) -> None:
    """Knows nothing but the address: services, messages and types all come by reflection."""
    services = reflect(channel, list_services="").list_services_response.service
    assert SERVICE in [found.name for found in services]
    pool = descriptor_pool.DescriptorPool()
    answer = reflect(channel, file_containing_symbol=SERVICE).file_descriptor_response
    for data in answer.file_descriptor_proto:
        pool.Add(FileDescriptorProto.FromString(data))
    method = pool.FindServiceByName(SERVICE).methods_by_name["Generate"]
    asked_type = message_factory.GetMessageClass(method.input_type)
    delta_type = message_factory.GetMessageClass(method.output_type)
    call = channel.unary_stream(
        f"/{SERVICE}/Generate", asked_type.SerializeToString, delta_type.FromString
    )
    body = {"text": RAW["text"], "sampling": {"temperature": 0.0, "max_tokens": 6}}
    deltas = call(json_format.ParseDict(body, asked_type()), timeout=TIMEOUT)
    parts = [json_format.MessageToDict(delta) for delta in deltas]
    ids = [token for part in parts for token in part.get("tokenIds", [])]
    assert ids == RAW["output_token_ids"][:6]


# -- our own client ---------------------------------------------------------------------------------


def test_the_python_client(service: Service) -> None:
    with Client(service.target) as client:
        for prompt in (RAW["text"], RAW["prompt_token_ids"]):
            deltas = list(client.generate(prompt, temperature=0, max_tokens=6))
            ids = [token for delta in deltas for token in delta.token_ids]
            assert ids == RAW["output_token_ids"][:6]
        with pytest.raises(ClientError, match="top_p") as caught:
            list(client.generate("x", top_p=7))
        assert caught.value.code == "INVALID_ARGUMENT"
        stream = client.generate("x", max_tokens=2000, ignore_eos=True)
        next(stream)
        stream.close()
    service.wait_until_idle()
