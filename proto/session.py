"""Messages that keep processes together: registration, heartbeats, requests and their tokens.

An *incarnation* is a random 63-bit number that a process draws when it starts; a new one means that
everything the old one knew is gone. `request` numbers are drawn by a gateway, ascending from 1, and
mean something only together with the gateway's incarnation. `attempt` counts how often a gateway has
submitted a request; a higher one cancels lower ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from octavo.proto.plan import Beams, DrawLogprobs, Sampling
from octavo.proto.wire import (
    COUNT,
    INCARNATION,
    Float32s,
    Int32s,
    Message,
    ProtocolError,
    all_below,
    bounded,
    float32s,
    int32s,
    limited,
    message,
    part,
)

# ---------------------------------------------------------------------------------------------
# Worker <-> control plane. A worker has two DEALER sockets to the control plane's worker port: the
# *data* socket of its main thread (plans, results) and the *control* socket of its heartbeat thread
# (everything below). Their routing ids are data_identity(incarnation) and
# control_identity(incarnation).
# ---------------------------------------------------------------------------------------------


def data_identity(incarnation: int) -> bytes:
    """Routing id of the socket on which a worker gets plans."""
    return b"d%016x" % incarnation


def control_identity(incarnation: int) -> bytes:
    """Routing id of the socket on which a worker registers and beats."""
    return b"c%016x" % incarnation


@part
class ModelInfo(Message):
    """What the planes need to know of a model. Filled from the model's files."""

    name: str = limited(512)
    family: str = limited(64)  # "llama"
    digest: str = limited(128)  # of the model's files, tokenizer included
    vocab_size: int = bounded(1, (1 << 31) - 1)
    max_model_len: int = bounded(1, (1 << 31) - 1)  # tokens that the model's positions allow
    eos_token_ids: Int32s = limited(1024, default_factory=int32s)


@message("join")
class Join(Message):
    """Worker of a gang of several ranks -> control plane, before it reads weights: which shard?

    Sent again until `Seat` or `Refused` comes. A seat is kept while the worker beats.
    """

    incarnation: int = bounded(*INCARNATION)
    tensor_parallel: int  # ranks that a gang shall have
    model: ModelInfo = limited(1)
    gang: int | None = None  # --gang and --rank: the seat that this worker claims
    rank: int | None = None


@message("seat")
class Seat(Message):
    """Control plane -> worker: the answer to `Join`."""

    controlplane: int  # incarnation
    gang: int
    rank: int


@message("register")
class Register(Message):
    """Worker -> control plane, when it has loaded its model, and again to a new control plane."""

    incarnation: int = bounded(*INCARNATION)
    device: str = limited(64)  # "cpu", "cuda:0"
    engine: str = limited(64)  # "torch"
    model: ModelInfo = limited(1)
    block_sizes: Int32s = limited(
        64, default_factory=int32s
    )  # tokens; supported sizes, the preferred one first.
    # Empty: any size; then `preferred_block_size` alone counts
    preferred_block_size: int = 16
    tensor_parallel: int = 1  # ranks of its gang
    gang: int | None = None  # the seat that it holds or claims; None: any
    rank: int | None = None
    rendezvous: str = limited(512, default="")  # host:port where its gang can meet, if it has rank 0
    weight_bytes: int = 0  # of the weights that this rank holds
    token_bytes: int = 0  # bytes of KV cache per token, all layers, this rank
    kv_bytes: int = 0  # room for the device pool; 0 where `num_kv_blocks` is set
    num_kv_blocks: int | None = None  # --num-kv-blocks
    swap_bytes: int = 0
    swap_blocks: int | None = None  # --swap-blocks
    copy_bandwidth: float = 0.0  # bytes per second between the pools, measured; 0: not measured
    prefill_speed: float = 0.0  # tokens per second, measured; 0: not measured


@message("reset")
class Reset(Message):
    """Control plane -> worker (control socket): forget all slots and blocks, join this epoch.

    Also the answer to `Register`. The worker makes its pools if it has none of this shape, and
    answers `Ready`. Plans of older epochs are dropped from here on.
    """

    controlplane: int  # incarnation
    epoch: int
    gang: int
    rank: int
    gang_size: int
    rendezvous: str = limited(512)  # `Register.rendezvous` of rank 0; empty for one rank
    block_size: int = 16  # tokens
    num_slots: int = 0  # slots are 0 .. num_slots - 1
    max_batched_tokens: int = 0  # no plan has more tokens in its rows
    max_model_len: int = 0  # no block table holds more tokens than this
    num_blocks: int = 0  # of the device pool
    num_cpu_blocks: int = 0  # of the swap pool


@message("ready")
class Ready(Message):
    """Worker -> control plane: the reset of this epoch is done, plans may come.

    Sent when the data socket is connected, so that the control plane can address it from here on.
    """

    incarnation: int = bounded(*INCARNATION)
    epoch: int


@message("refused")
class Refused(Message):
    """Control plane -> worker or gateway: you cannot take part, and why. The receiver exits."""

    reason: str = limited(4096)


@message("worker-beat")
class WorkerBeat(Message):
    """Worker -> control plane, every `beat interval`, from a thread that no forward can block."""

    incarnation: int = bounded(*INCARNATION)
    epoch: int  # the epoch of the last reset done; 0 before the first
    plans_done: int  # of this epoch


@message("worker-bye")
class WorkerBye(Message):
    """Worker -> control plane: an orderly stop."""

    incarnation: int = bounded(*INCARNATION)


@message("beat-answer")
class BeatAnswer(Message):
    """Control plane -> worker or gateway: I am here. An unknown incarnation means: register again."""

    controlplane: int  # incarnation
    known: bool  # whether the sender is registered with this incarnation
    # Requests that a gateway's beat lists and the control plane does not hold. What the control
    # plane sent of them before has arrived already, so a request that still waits needs a new attempt.
    missing: Int32s = limited(default_factory=int32s)
    missing_attempts: Int32s = limited(default_factory=int32s)


# ---------------------------------------------------------------------------------------------
# Gateway <-> control plane. A gateway has one DEALER socket to the control plane's gateway port;
# its routing id is gateway_identity(incarnation).
# ---------------------------------------------------------------------------------------------


def gateway_identity(incarnation: int) -> bytes:
    """Routing id of a gateway's socket."""
    return b"g%016x" % incarnation


@message("hello")
class Hello(Message):
    """Gateway -> control plane, on start and again to a new control plane."""

    incarnation: int = bounded(*INCARNATION)
    model_digest: str = limited(128)


@message("welcome")
class Welcome(Message):
    """Control plane -> gateway: the answer to `Hello`, and again whenever something here changes."""

    controlplane: int  # incarnation
    ready: bool  # some gang can serve
    lease: float = 30.0  # seconds of silence after which a gateway's requests are freed
    # Limits of the service; 0 while no gang has ever been ready.
    max_model_len: int = 0
    max_sequences: int = 0  # n or best_of at most


@part
class SampleState(Message):
    """What a sample of an earlier attempt has produced already."""

    tokens: Int32s = limited(default_factory=int32s)
    finish: str = limited(16, default="")  # finish reason; empty while unfinished


@message("submit")
class Submit(Message):
    """Gateway -> control plane: run this. Idempotent on (gateway, request, attempt)."""

    gateway: int = bounded(*INCARNATION)  # incarnation
    request: int = bounded(*COUNT)  # 1 ..
    attempt: int = bounded(*COUNT)  # 0 ..
    arrival: float = bounded(0.0, 1e12)  # Unix seconds; kept through attempts: part of the order key
    priority: int = bounded(-(1 << 31), (1 << 31) - 1)  # lower first
    prompt: Int32s  # token ids
    samples: list[SampleState] = limited(1024)  # [n]; empty states on the first attempt
    max_tokens: int = bounded(*COUNT)  # outputs of each sample
    sampling: Sampling = limited(1)
    cache_salt: str = limited(256, default="")
    beams: Beams | None = None  # beam search as wide as there are samples


@message("cancel")
class Cancel(Message):
    """Gateway -> control plane: stop these samples of a request. Idempotent."""

    gateway: int = bounded(*INCARNATION)
    request: int = bounded(*COUNT)
    attempt: int = bounded(*COUNT)
    samples: Int32s = limited(1024, default_factory=int32s)  # empty: all of them


@message("gateway-beat")
class GatewayBeat(Message):
    """Gateway -> control plane: renews the lease and lists what the gateway still wants.

    Requests of the gateway that the control plane holds and the list lacks are freed, unless they
    were submitted after the beat was sent (`newest`).
    """

    gateway: int = bounded(*INCARNATION)
    newest: int  # the highest request number submitted before this beat
    requests: Int32s = limited(default_factory=int32s)
    attempts: Int32s = limited(default_factory=int32s)
    offsets: Int32s = limited(default_factory=int32s)  # tokens received, over all samples


@dataclass(kw_only=True)
class Finish:
    """A sample's end. Travels after its last token."""

    request: int
    attempt: int
    sample: int
    reason: str  # one of FINISH_REASONS
    stop_token: int | None = None  # the EOS or stop token id that ended it
    score: float | None = None  # of a hypothesis of a beam search


FINISH_REASONS = ("stop", "length")


@part
class Finishes(Message):
    """All endings of an iteration as columns. Iterating gives a `Finish` for each."""

    requests: Int32s = limited(default_factory=int32s)
    attempts: Int32s = limited(default_factory=int32s)
    samples: Int32s = limited(default_factory=int32s)
    reasons: Int32s = limited(default_factory=int32s)  # indices of FINISH_REASONS
    stop_tokens: list[int | None] = limited(1 << 16, default_factory=list)
    scores: list[float | None] = limited(1 << 16, default_factory=list)

    @classmethod
    def of(cls, finishes: Sequence[Finish]) -> Self:
        """The columns of these endings."""
        return cls(
            requests=int32s([finish.request for finish in finishes]),
            attempts=int32s([finish.attempt for finish in finishes]),
            samples=int32s([finish.sample for finish in finishes]),
            reasons=int32s([FINISH_REASONS.index(finish.reason) for finish in finishes]),
            stop_tokens=[finish.stop_token for finish in finishes],
            scores=[finish.score for finish in finishes],
        )

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Finish]:
        for i, (stop_token, score) in enumerate(zip(self.stop_tokens, self.scores, strict=True)):
            yield Finish(
                request=int(self.requests[i]),
                attempt=int(self.attempts[i]),
                sample=int(self.samples[i]),
                reason=FINISH_REASONS[self.reasons[i]],
                stop_token=stop_token,
                score=score,
            )

    def validate(self) -> None:
        """Raises ProtocolError if the columns do not fit one another or a reason is unknown."""
        columns = (self.attempts, self.samples, self.reasons, self.stop_tokens, self.scores)
        if any(len(column) != len(self) for column in columns):
            raise ProtocolError("tokens.finishes: the columns differ in length")
        if not all_below(self.reasons, len(FINISH_REASONS)):
            raise ProtocolError(f"tokens.finishes.reasons: not in [0, {len(FINISH_REASONS)})")


@part
class PromptScores(Message):
    """Log-probabilities of the prompt tokens start, start+1, ... of a request."""

    request: int
    attempt: int
    start: int
    logprobs: Float32s = limited(default_factory=float32s)  # [n]
    top_count: int = 0
    top_ids: Int32s = limited(default_factory=int32s)  # [n * top_count], best first
    top_logprobs: Float32s = limited(default_factory=float32s)


@message("tokens")
class Tokens(Message):
    """Control plane -> gateway: all its tokens of one iteration, as parallel arrays."""

    controlplane: int
    requests: Int32s = limited(default_factory=int32s)
    attempts: Int32s = limited(default_factory=int32s)
    samples: Int32s = limited(default_factory=int32s)
    offsets: Int32s = limited(default_factory=int32s)  # index of the token among the sample's outputs
    tokens: Int32s = limited(default_factory=int32s)
    logprobs: DrawLogprobs | None = None  # `draws` index into `tokens` of this message
    prompt_scores: list[PromptScores] = limited(1 << 16, default_factory=list)
    finishes: Finishes = limited(1, default_factory=Finishes)
    # Requests whose first row has just been planned, and how many of their prompt tokens came from
    # the prefix index; parallel arrays.
    started: Int32s = limited(default_factory=int32s)
    started_attempts: Int32s = limited(default_factory=int32s)
    cached: Int32s = limited(default_factory=int32s)


@message("failure")
class Failure(Message):
    """Control plane -> gateway: this request gets an error, and its samples no more tokens."""

    controlplane: int
    request: int
    attempt: int
    code: str = limited(32)  # name of a gRPC status code: "INVALID_ARGUMENT", ...
    reason: str = limited(4096)  # names the field and the limit


@message("pin")
class Pin(Message):
    """Gateway -> control plane: compute this prefix and keep its full blocks until `Unpin`.

    A name that is pinned already with the same tokens and salt is answered as it is.
    """

    gateway: int = bounded(*INCARNATION)
    query: int
    name: str = limited(256)
    tokens: Int32s
    cache_salt: str = limited(256, default="")


@message("unpin")
class Unpin(Message):
    """Gateway -> control plane: the prefix of this name is not needed any more."""

    gateway: int = bounded(*INCARNATION)
    query: int
    name: str = limited(256)


@message("pins-query")
class PinsQuery(Message):
    """Gateway -> control plane: which prefixes are registered?"""

    gateway: int = bounded(*INCARNATION)
    query: int


@part
class PinState(Message):
    """A registered prefix."""

    name: str = limited(256)
    tokens: int  # in its full blocks
    blocks: int  # pinned; 0 while they are being computed


@message("pins")
class Pins(Message):
    """Control plane -> gateway: the answer to `Pin` (once it is computed), `Unpin` or `PinsQuery`."""

    query: int
    code: str = limited(32, default="OK")  # name of a gRPC status code
    reason: str = limited(4096, default="")
    pins: list[PinState] = limited(4096, default_factory=list)  # `Pin`: that one; `PinsQuery`: all


@message("info-query")
class InfoQuery(Message):
    """Gateway -> control plane: for GetServerInfo and /metrics."""

    query: int


@part
class Pool(Message):
    """Counts of blocks; free + cached + pinned + used = total."""

    total: int = 0
    free: int = 0
    cached: int = 0
    pinned: int = 0
    used: int = 0


@part
class GangState(Message):
    """One gang as the control plane sees it."""

    gang: int
    size: int
    epoch: int
    ready: bool
    device: str = limited(64)
    engine: str = limited(64)
    block_size: int = 0
    device_pool: Pool = limited(1, default_factory=Pool)
    swap_pool: Pool = limited(1, default_factory=Pool)
    plans: int = 0  # sent in this epoch
    running: int = 0  # sequence groups


@message("info")
class Info(Message):
    """Control plane -> gateway: the answer to `InfoQuery`."""

    query: int
    controlplane: int
    ready: bool
    waiting: int  # sequence groups in each state
    preempted: int
    running: int
    gangs: list[GangState] = limited(1024, default_factory=list)
