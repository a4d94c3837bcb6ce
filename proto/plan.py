"""What the control plane tells a gang to do in one iteration, and what the gang answers.

A plan is a change, not the world: a worker keeps the state of each *slot* (block table, tokens so
far, sampling parameters) and the plan says what changes before the rows run. The parts are applied
in the order in which they are declared:

    swap_out, swap_in, copies, frees, admits, forks, table entries, pushes, rows, draws

Block ids are indices into the gang's device pool, "cpu block" ids into its CPU swap pool. A pair
array holds ``[a0, b0, a1, b1, ...]``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from octavo.proto.wire import (
    COUNT,
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

EARLY_STOPPING = ("true", "false", "never")
MAX_LOGPROBS = 1024  # best tokens of a position; gateways allow far fewer


@part
class Sampling(Message):
    """How a slot draws tokens; the values are already validated. Filled by the gateway.

    `min_tokens`, `stop_token_ids`, `eos_token_ids` are here because a worker must not draw an ending
    token before `min_tokens` outputs exist.
    """

    temperature: float = bounded(0.0, 100.0, default=1.0)  # 0 is greedy
    top_k: int = bounded(*COUNT, default=0)  # 0 keeps all
    top_p: float = bounded(0.0, 1.0, default=1.0)
    min_p: float = bounded(0.0, 1.0, default=0.0)
    repetition_penalty: float = bounded(0.0, 100.0, default=1.0)  # over prompt and output
    presence_penalty: float = bounded(-2.0, 2.0, default=0.0)  # over output
    frequency_penalty: float = bounded(-2.0, 2.0, default=0.0)  # over output
    seed: int = bounded(0, (1 << 64) - 1, default=0)  # unsigned 64 bits: the Philox key
    min_tokens: int = bounded(*COUNT, default=0)
    ignore_eos: bool = False
    logprobs: int | None = bounded(
        0, MAX_LOGPROBS, default=None
    )  # None: none; k: the drawn token's and the k best
    prompt_logprobs: int | None = bounded(0, MAX_LOGPROBS, default=None)
    bias_ids: Int32s = limited(4096, default_factory=int32s)
    bias_values: Float32s = limited(4096, default_factory=float32s)
    stop_token_ids: Int32s = limited(1024, default_factory=int32s)
    eos_token_ids: Int32s = limited(1024, default_factory=int32s)
    # 0: a token is drawn. k: instead, the k best tokens with their log-probabilities are answered,
    # after bias, masks and penalties, and the slot gets its token with a later plan (beam search).
    candidates: int = bounded(*COUNT, default=0)

    @cached_property
    def packed(self) -> bytes:
        """Made once, when the parameters are final: they travel with every admission of a request."""
        return self.to_bytes()


@part
class Beams(Message):
    """Beam search, with the meanings of Hugging Face `generate`. Filled by the gateway."""

    length_penalty: float = bounded(-10.0, 10.0, default=1.0)
    early_stopping: str = limited(8, default="false")  # "true", "false" or "never"


@dataclass(kw_only=True)
class Admit:
    """Gives a slot to a sequence. Filled by the scheduler, on admission and on resumption.

    The worker sets the slot's state whole: whatever the slot held before is gone.
    """

    slot: int
    tokens: Int32s  # prompt and the outputs so far
    prompt_len: int  # tokens[:prompt_len] is the prompt
    computed: int  # tokens[:computed] have their KV in the blocks already; the first row starts here
    blocks: Int32s  # the block table
    sample: int  # index of the sample in its request: part of the Philox counter
    sampling: Sampling
    # Log-probabilities of prompt tokens at positions >= this are wanted, if any are.
    prompt_logprobs_from: int = 0


@part
class Admits(Message):
    """All admissions of a plan as columns: entry i of each is about the same sequence.

    `tokens` and `blocks` hold those of all sequences one after the other, as many as the counts say.
    Iterating gives an `Admit` for each.
    """

    slots: Int32s = limited(default_factory=int32s)
    token_counts: Int32s = limited(default_factory=int32s)
    tokens: Int32s = limited(default_factory=int32s)
    prompt_lens: Int32s = limited(default_factory=int32s)
    computed: Int32s = limited(default_factory=int32s)
    block_counts: Int32s = limited(default_factory=int32s)
    blocks: Int32s = limited(default_factory=int32s)
    samples: Int32s = limited(default_factory=int32s)
    samplings: list[bytes] = limited(1 << 16, default_factory=list)  # each a `Sampling.packed`
    prompt_logprobs_from: Int32s = limited(default_factory=int32s)

    @classmethod
    def of(cls, admits: Sequence[Admit]) -> Self:
        """The columns of these admissions."""
        return cls(
            slots=int32s([admit.slot for admit in admits]),
            token_counts=int32s([len(admit.tokens) for admit in admits]),
            tokens=np.concatenate([int32s(), *(admit.tokens for admit in admits)]),
            prompt_lens=int32s([admit.prompt_len for admit in admits]),
            computed=int32s([admit.computed for admit in admits]),
            block_counts=int32s([len(admit.blocks) for admit in admits]),
            blocks=np.concatenate([int32s(), *(admit.blocks for admit in admits)]),
            samples=int32s([admit.sample for admit in admits]),
            samplings=[admit.sampling.packed for admit in admits],
            prompt_logprobs_from=int32s([admit.prompt_logprobs_from for admit in admits]),
        )

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Admit]:
        tokens = np.split(self.tokens, np.cumsum(self.token_counts)[:-1])
        blocks = np.split(self.blocks, np.cumsum(self.block_counts)[:-1])
        for i, sampling in enumerate(self.samplings):
            yield Admit(
                slot=int(self.slots[i]),
                tokens=tokens[i],
                prompt_len=int(self.prompt_lens[i]),
                computed=int(self.computed[i]),
                blocks=blocks[i],
                sample=int(self.samples[i]),
                sampling=Sampling.from_bytes(sampling, "plan.admits.samplings"),
                prompt_logprobs_from=int(self.prompt_logprobs_from[i]),
            )

    def validate(self, num_slots: int, num_blocks: int) -> None:
        """Raises ProtocolError if a column does not fit the others or an id is out of range."""
        if not any(len(getattr(self, name)) for name in (*_ADMIT_COLUMNS, "tokens", "blocks")):
            return
        if any(len(getattr(self, name)) != len(self) for name in _ADMIT_COLUMNS):
            raise ProtocolError("plan.admits: the columns differ in length")
        for name in ("token", "block"):
            counts = getattr(self, f"{name}_counts").astype(np.int64)
            if (counts < 0).any() or counts.sum() != len(getattr(self, f"{name}s")):
                raise ProtocolError(f"plan.admits.{name}_counts: not those of the {name}s")
        _in_range(self.slots, num_slots, "plan.admits.slots")
        _in_range(self.blocks, num_blocks, "plan.admits.blocks")


# Those with one entry for each admission.
_ADMIT_COLUMNS = (
    "slots",
    "token_counts",
    "prompt_lens",
    "computed",
    "block_counts",
    "samples",
    "samplings",
    "prompt_logprobs_from",
)


@message("plan")
class Plan(Message):
    """One iteration of one gang. Plans of one epoch are numbered 0, 1, 2, ... and run in order.

    Block manager fills the block operations, the scheduler the rest.
    """

    epoch: int  # scheduler: plans of another epoch than the worker's are dropped in silence
    number: int  # scheduler: a wrong number within the epoch is an error
    # -- block operations; read and write sets of these parts are disjoint ---------------------
    # Pairs (device block, cpu block): block manager.
    swap_out: Int32s = limited(default_factory=int32s)
    # Pairs (cpu block, device block): block manager.
    swap_in: Int32s = limited(default_factory=int32s)
    # Pairs (source, destination), all layers: copy-on-write by the block manager.
    copies: Int32s = limited(default_factory=int32s)
    # -- slot changes: scheduler -----------------------------------------------------------------
    # These slots hold no sequence any more.
    free_slots: Int32s = limited(default_factory=int32s)
    admits: Admits = limited(1, default_factory=Admits)
    # Triples (parent slot, child slot, sample index of the child): the child starts as a copy of
    # the parent's state, block table included.
    forks: Int32s = limited(default_factory=int32s)
    # The block table of table_slots[i] gets, at table_indices[i] (at most its length: an append),
    # table_blocks[i].
    table_slots: Int32s = limited(default_factory=int32s)
    table_indices: Int32s = limited(default_factory=int32s)
    table_blocks: Int32s = limited(default_factory=int32s)
    # Tokens that the control plane has chosen for slots (beam search): push_tokens[i] is appended to
    # the tokens of push_slots[i].
    push_slots: Int32s = limited(default_factory=int32s)
    push_tokens: Int32s = limited(default_factory=int32s)
    # -- rows: scheduler ---------------------------------------------------------------------------
    # Each computes its slot's last token and draws the next.
    decode_slots: Int32s = limited(default_factory=int32s)
    # Each computes the next chunk_lengths[i] tokens of chunk_slots[i].
    chunk_slots: Int32s = limited(default_factory=int32s)
    chunk_lengths: Int32s = limited(default_factory=int32s)
    # A token is drawn for draw_slots[j] from the last position of chunk number draw_chunks[j].
    draw_slots: Int32s = limited(default_factory=int32s)
    draw_chunks: Int32s = limited(default_factory=int32s)

    def validate(self, num_slots: int, num_blocks: int, num_cpu_blocks: int) -> None:
        """Raises ProtocolError if an array does not fit its partner or an id is out of range."""
        for first, *others in _PARTNERS:
            length = len(getattr(self, first))
            if any(len(getattr(self, other)) != length for other in others):
                raise ProtocolError(f"plan.{first}: not as long as {', '.join(others)}")
        for name in _SLOTS:
            _in_range(getattr(self, name), num_slots, f"plan.{name}")
        _in_range(self.table_blocks, num_blocks, "plan.table_blocks")
        _in_range(self.draw_chunks, len(self.chunk_slots), "plan.draw_chunks")
        _tuples_in_range(self.swap_out, (num_blocks, num_cpu_blocks), "plan.swap_out")
        _tuples_in_range(self.swap_in, (num_cpu_blocks, num_blocks), "plan.swap_in")
        _tuples_in_range(self.copies, (num_blocks, num_blocks), "plan.copies")
        _tuples_in_range(self.forks, (num_slots, num_slots, None), "plan.forks")
        self.admits.validate(num_slots, num_blocks)


# Arrays of one length, and arrays of slots.
_PARTNERS = (
    ("table_slots", "table_indices", "table_blocks"),
    ("chunk_slots", "chunk_lengths"),
    ("draw_slots", "draw_chunks"),
    ("push_slots", "push_tokens"),
)
_SLOTS = ("free_slots", "table_slots", "push_slots", "decode_slots", "chunk_slots", "draw_slots")


def _tuples_in_range(ids: Int32s, limits: tuple[int | None, ...], path: str) -> None:
    """For an array of pairs or triples, each part with a limit of its own; None: without."""
    if not len(ids):
        return
    if len(ids) % len(limits):
        raise ProtocolError(f"{path}: not {'pairs' if len(limits) == 2 else 'triples'}")
    for place, limit in enumerate(limits):
        if limit is not None:
            _in_range(ids[place :: len(limits)], limit, path)


def _in_range(ids: Int32s, limit: int, path: str) -> None:
    if not all_below(ids, limit):
        raise ProtocolError(f"{path}: an id is not in [0, {limit})")


@part
class DrawLogprobs(Message):
    """Log-probabilities of drawn tokens, natural logarithm of the model's raw distribution.

    Filled by the worker for those draws whose slot asked for them.
    """

    draws: Int32s = limited(default_factory=int32s)  # [n] indices into Result.tokens, ascending
    logprobs: Float32s = limited(default_factory=float32s)  # [n] of the drawn tokens
    top_counts: Int32s = limited(default_factory=int32s)  # [n] how many of the best follow for each
    top_ids: Int32s = limited(default_factory=int32s)  # [sum(top_counts)], best first
    top_logprobs: Float32s = limited(default_factory=float32s)


@part
class Candidates(Message):
    """The best continuations of slots that do not draw. Filled by the worker."""

    draws: Int32s = limited(default_factory=int32s)  # [n] indices into Result.tokens, ascending
    counts: Int32s = limited(default_factory=int32s)  # [n] how many follow for each
    ids: Int32s = limited(default_factory=int32s)  # [sum(counts)], best first
    logprobs: Float32s = limited(default_factory=float32s)


@part
class PromptLogprobs(Message):
    """Log-probabilities of prompt tokens start, start+1, ... of one slot. Filled by the worker."""

    chunk: int  # index into Plan.chunk_slots
    start: int  # position of the first token that this part is about; >= 1
    logprobs: Float32s = limited(default_factory=float32s)  # [n]
    top_count: int = 0  # k of each token's best
    top_ids: Int32s = limited(default_factory=int32s)  # [n * k]
    top_logprobs: Float32s = limited(default_factory=float32s)


@part
class Timings(Message):
    """Where an iteration's time went on the worker, in seconds. Filled by the worker."""

    apply: float = 0.0  # block operations and slot changes
    forward: float = 0.0
    sample: float = 0.0
    total: float = 0.0  # from the plan's arrival to the result's departure


@message("result")
class Result(Message):
    """A rank's answer to a plan. Matched by (epoch, number, draw), never by slot."""

    epoch: int
    number: int
    rank: int
    # A token for each of decode_slots, then one for each of draw_slots. For slots that ask for
    # candidates it is the best one and means nothing more.
    tokens: Int32s = limited(default_factory=int32s)
    digest: int = 0  # CRC-32 of the bytes of `tokens`; the ranks of a gang must agree
    draw_logprobs: DrawLogprobs | None = None
    candidates: Candidates | None = None
    prompt_logprobs: list[PromptLogprobs] = limited(1 << 16, default_factory=list)
    timings: Timings = limited(1, default_factory=Timings)


@message("fault")
class Fault(Message):
    """A rank could not run a plan of its epoch. Sent once instead of a result."""

    epoch: int
    number: int
    rank: int
    reason: str = limited(4096)
