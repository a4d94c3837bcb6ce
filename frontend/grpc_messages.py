"""Between the messages of generation.proto and the gateway's own values."""

from collections.abc import Iterable
from typing import Any

from octavo.frontend.errors import invalid
from octavo.frontend.requests import ChatPrompt, GenerateCall, SampleSoFar, SamplingRequest
from octavo.frontend.sample import Delta, TokenScore
from octavo.frontend.streams import Stream
from octavo.frontend.tokenizer import Tokenizer
from octavo.proto.session import GangState, Info, PinState, Pool
from octavo.v1 import generation_pb2 as pb

ROLES = ("system", "user", "assistant")

# Fields of SamplingParams that go through under their own name when they are set.
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
    "include_stop",
    "n",
    "best_of",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
)


def read_request(request: pb.GenerateRequest) -> GenerateCall:
    """The call that a client's message makes. Raises RequestError."""
    return GenerateCall(
        prompt=_read_prompt(request),
        sampling=_read_sampling(request.sampling),
        echo=request.echo,
        priority=request.priority,
        cache_salt=request.cache_salt,
        resume=_read_resume(request),
    )


def _read_resume(request: pb.GenerateRequest) -> list[SampleSoFar]:
    if not request.HasField("resume"):
        return []
    if not request.resume.samples:
        raise invalid("resume.samples", "must have a sample for each of n")
    return [SampleSoFar(list(s.token_ids), s.finish_reason) for s in request.resume.samples]


def read_chat(chat: pb.ChatPrompt) -> ChatPrompt:
    """Chat messages with known roles. Raises RequestError."""
    for i, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise invalid(f"chat.messages[{i}].role", f"must be one of {', '.join(ROLES)}")
    return ChatPrompt([{"role": m.role, "content": m.content} for m in chat.messages])


def read_prefix(request: pb.RegisterPrefixRequest) -> str | list[int]:
    """The text or token ids of a prefix. Raises RequestError."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise invalid("prompt", "must be given as text or token_ids")
    return str(request.text) if kind == "text" else list(request.token_ids.ids)


def _read_prompt(request: pb.GenerateRequest) -> str | list[int] | ChatPrompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return str(request.text)
    if kind == "token_ids":
        return list(request.token_ids.ids)
    if kind == "chat":
        return read_chat(request.chat)
    raise invalid("prompt", "must be given as text, token_ids or chat")


def _read_sampling(params: pb.SamplingParams) -> SamplingRequest:
    given: dict[str, Any] = {name: getattr(params, name) for name in _SCALARS if params.HasField(name)}
    return SamplingRequest(
        logit_bias=dict(params.logit_bias),
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        **given,
    )


class Writer:
    """Writes one stream's deltas as messages."""

    def __init__(self, stream: Stream, tokenizer: Tokenizer) -> None:
        self._stream = stream
        self._tokenizer = tokenizer
        self._is_first = True

    def message(self, delta: Delta, is_last: bool) -> pb.GenerateDelta:
        """The next message of the stream."""
        message = pb.GenerateDelta(
            index=delta.index,
            text=delta.text,
            token_ids=delta.token_ids,
            finish_reason=delta.finish_reason,
            stop_reason="" if delta.stop_reason is None else str(delta.stop_reason),
            score=delta.score,
        )
        if delta.scores:
            message.logprobs.extend(self._scores(delta.scores))
        if self._is_first:
            self._is_first = False
            self._head(message)
        if is_last:
            message.usage.CopyFrom(self._usage())
        return message

    def reply(self, deltas: Iterable[Delta]) -> pb.GenerateReply:
        """All of a stream's deltas as one answer."""
        choices: dict[int, pb.Choice] = {}
        reply = pb.GenerateReply(usage=self._usage())
        for delta in deltas:
            choice = choices.setdefault(delta.index, pb.Choice(index=delta.index))
            choice.text += delta.text
            choice.token_ids.extend(delta.token_ids)
            choice.logprobs.extend(self._scores(delta.scores))
            if delta.finish_reason:
                choice.finish_reason = delta.finish_reason
                choice.stop_reason = "" if delta.stop_reason is None else str(delta.stop_reason)
            if delta.score is not None:
                choice.score = delta.score
        reply.choices.extend(choices[i] for i in sorted(choices))
        self._head(reply)
        return reply

    def _head(self, message: pb.GenerateDelta | pb.GenerateReply) -> None:
        message.prompt_token_ids.extend(self._stream.prompt_ids)
        message.prompt_logprobs.extend(self._scores(self._stream.prompt_scores))
        message.seed = self._stream.seed

    def _usage(self) -> pb.Usage:
        usage = self._stream.usage()
        return pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )

    def _scores(self, scores: Iterable[TokenScore]) -> list[pb.TokenLogprob]:
        return [self._score(score) for score in scores]

    def _score(self, score: TokenScore) -> pb.TokenLogprob:
        pieces = self._tokenizer.vocabulary.pieces
        return pb.TokenLogprob(
            token_id=score.token,
            logprob=score.logprob or 0.0,
            token=self._tokenizer.token_text(score.token),
            token_bytes=pieces[score.token],
            absent=score.logprob is None,
            text_offset=score.text_offset,
            top=[
                pb.TopLogprob(
                    token_id=token,
                    logprob=logprob,
                    token=self._tokenizer.token_text(token),
                    token_bytes=pieces[token],
                )
                for token, logprob in score.top
            ],
        )


def server_info(info: Info, version: str, gateway: int) -> pb.GetServerInfoReply:
    """`gateway` is this gateway's incarnation."""
    return pb.GetServerInfoReply(
        version=version,
        ready=info.ready,
        gangs=[_gang(gang) for gang in info.gangs],
        waiting=info.waiting,
        preempted=info.preempted,
        running=info.running,
        gateway_incarnation=gateway,
        controlplane_incarnation=info.controlplane,
    )


def prefix_list(pins: Iterable[PinState]) -> pb.ListPrefixesReply:
    """Registered prefixes, as a client sees them."""
    return pb.ListPrefixesReply(
        prefixes=[
            pb.PrefixInfo(name=pin.name, pinned_tokens=pin.tokens, pinned_blocks=pin.blocks)
            for pin in pins
        ]
    )


def _gang(gang: GangState) -> pb.GangInfo:
    return pb.GangInfo(
        gang=gang.gang,
        size=gang.size,
        epoch=gang.epoch,
        ready=gang.ready,
        device=gang.device,
        engine=gang.engine,
        block_size=gang.block_size,
        device_pool=_pool(gang.device_pool),
        swap_pool=_pool(gang.swap_pool),
        plans=gang.plans,
        running=gang.running,
    )


def _pool(pool: Pool) -> pb.PoolInfo:
    return pb.PoolInfo(
        total_blocks=pool.total,
        free_blocks=pool.free,
        cached_blocks=pool.cached,
        pinned_blocks=pool.pinned,
        used_blocks=pool.used,
    )
