"""The state of each slot between plans, as arrays over slots so that batches build vectorised."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from octavo.proto.plan import Admit, Sampling
from octavo.proto.wire import Int32s, all_below

Ints = npt.NDArray[np.int32]


class PlanError(ValueError):
    """A plan that does not fit the slots. The text names the part and the slot, never its tokens."""


@dataclass(frozen=True)
class _SamplingArrays:
    """What the steady state reads of each slot's `Sampling`, all ``[num_slots]``."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seed: npt.NDArray[np.int64]  # the bits of the unsigned 64-bit seed
    edits: npt.NDArray[np.bool_]  # whether logits are edited before the draw
    wants_logprobs: npt.NDArray[np.bool_]
    candidates: npt.NDArray[np.int32]  # how many best tokens are answered in place of a draw
    plain: npt.NDArray[np.bool_]  # greedy, and nothing else is asked for: the token alone


def _empty_arrays(num_slots: int) -> _SamplingArrays:
    return _SamplingArrays(
        temperature=np.zeros(num_slots, dtype=np.float32),
        top_k=np.zeros(num_slots, dtype=np.int64),
        top_p=np.zeros(num_slots, dtype=np.float64),
        min_p=np.zeros(num_slots, dtype=np.float64),
        seed=np.zeros(num_slots, dtype=np.int64),
        edits=np.zeros(num_slots, dtype=np.bool_),
        wants_logprobs=np.zeros(num_slots, dtype=np.bool_),
        candidates=np.zeros(num_slots, dtype=np.int32),
        plain=np.zeros(num_slots, dtype=np.bool_),
    )


@dataclass(frozen=True)
class Places:
    """Where drawn tokens go that the host does not have yet."""

    slots: Int32s
    positions: Ints
    sequences: Ints  # which holder of each slot they belong to


class Slots:
    """Block tables, tokens and sampling parameters of ``num_slots`` slots.

    ``tokens[s, :lengths[s]]`` is prompt and output, ``tokens[s, :computed[s]]`` have their KV in the
    blocks ``blocks[s, :num_blocks[s]]``. The runner changes the state through the methods only.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        self.num_slots, self.max_model_len = num_slots, max_model_len
        self.block_size, self._vocab_size = block_size, vocab_size
        max_blocks = -(-max_model_len // block_size)
        # Committed lazily by the system, as rows are first written. One more token than the model
        # takes: the last draw is stored, but never computed.
        self.tokens: Ints = np.zeros((num_slots, max_model_len + 1), dtype=np.int32)
        self.blocks: Ints = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.lengths: Ints = np.zeros(num_slots, dtype=np.int32)
        self.computed: Ints = np.zeros(num_slots, dtype=np.int32)
        self.prompt_lens: Ints = np.zeros(num_slots, dtype=np.int32)
        self.num_blocks: Ints = np.zeros(num_slots, dtype=np.int32)
        self.samples: Ints = np.zeros(num_slots, dtype=np.int32)
        self.prompt_logprobs_from: Ints = np.zeros(num_slots, dtype=np.int32)
        self.live: npt.NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        # The last token is drawn but has not reached the host: `tokens` does not have it yet.
        self.late: npt.NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self._sequence: Ints = np.zeros(num_slots, dtype=np.int32)  # counts who has held the slot
        self.draws = _empty_arrays(num_slots)
        self._sampling: list[Sampling | None] = [None] * num_slots

    def sampling(self, slot: int) -> Sampling:
        """The parameters of a live slot."""
        found = self._sampling[slot]
        if found is None:
            raise PlanError(f"slot {slot} holds no sequence")
        return found

    def outputs(self, slot: int) -> Ints:
        """The tokens drawn so far."""
        return self.tokens[slot, self.prompt_lens[slot] : self.lengths[slot]]

    def history(self, slot: int) -> Ints:
        """Prompt and outputs."""
        return self.tokens[slot, : self.lengths[slot]]

    def free(self, slots: Int32s) -> None:
        """Forgets sequences."""
        self.live[slots] = self.late[slots] = False
        self._sequence[slots] += 1
        for slot in slots.tolist():
            self._sampling[slot] = None

    def admit(self, admit: Admit) -> None:
        """Sets a slot's state whole. Raises PlanError."""
        self._check_admit(admit)
        slot, length, num_blocks = admit.slot, len(admit.tokens), len(admit.blocks)
        self.tokens[slot, :length] = admit.tokens
        self.blocks[slot, :num_blocks] = admit.blocks
        self.lengths[slot], self.num_blocks[slot] = length, num_blocks
        self.computed[slot], self.prompt_lens[slot] = admit.computed, admit.prompt_len
        self.samples[slot] = admit.sample
        self.prompt_logprobs_from[slot] = admit.prompt_logprobs_from
        self.live[slot], self.late[slot] = True, False
        self._sequence[slot] += 1
        self._set_sampling(slot, admit.sampling)

    def _check_admit(self, admit: Admit) -> None:
        length = len(admit.tokens)
        place = f"admit of slot {admit.slot}:"
        if not 1 <= length <= self.max_model_len:
            raise PlanError(f"{place} {length} tokens are not in [1, {self.max_model_len}]")
        if not 0 <= admit.prompt_len <= length or not 0 <= admit.computed < length:
            raise PlanError(f"{place} prompt_len or computed is not within the {length} tokens")
        if len(admit.blocks) > self.blocks.shape[1]:
            raise PlanError(f"{place} more than {self.blocks.shape[1]} blocks")
        if not 0 <= admit.sample < 1 << 31 or not 0 <= admit.prompt_logprobs_from < 1 << 31:
            raise PlanError(f"{place} sample or prompt_logprobs_from is out of range")
        self._check_ids(admit.tokens, f"{place} tokens")
        for name in ("bias_ids", "stop_token_ids", "eos_token_ids"):
            self._check_ids(getattr(admit.sampling, name), f"{place} sampling.{name}")
        _check_sampling(admit.sampling, place)

    def _check_ids(self, ids: Int32s, place: str) -> None:
        if not all_below(ids, self._vocab_size):
            raise PlanError(f"{place}: an id is not in [0, {self._vocab_size})")

    def _set_sampling(self, slot: int, sampling: Sampling) -> None:
        self._sampling[slot] = sampling
        draws = self.draws
        draws.temperature[slot] = sampling.temperature
        draws.top_k[slot], draws.top_p[slot] = max(0, sampling.top_k), sampling.top_p
        draws.min_p[slot] = sampling.min_p
        draws.seed[slot] = np.uint64(sampling.seed).astype(np.int64)
        draws.edits[slot] = edits_logits(sampling)
        draws.wants_logprobs[slot] = sampling.logprobs is not None
        draws.candidates[slot] = sampling.candidates
        draws.plain[slot] = is_plain(sampling)

    def fork(self, parent: int, child: int, sample: int) -> None:
        """Copies the parent's state; only the sample index is the child's own. Raises PlanError."""
        if not self.live[parent] or parent == child or sample < 0:
            raise PlanError(f"fork of slot {parent} to {child}: no such parent, or itself")
        length, num_blocks = self.lengths[parent], self.num_blocks[parent]
        self.tokens[child, :length] = self.tokens[parent, :length]
        self.blocks[child, :num_blocks] = self.blocks[parent, :num_blocks]
        own = (self.lengths, self.computed, self.prompt_lens, self.num_blocks, self.live)
        for array in (*own, self.prompt_logprobs_from):
            array[child] = array[parent]
        for field in fields(self.draws):
            array = getattr(self.draws, field.name)
            array[child] = array[parent]
        self.samples[child], self.late[child] = sample, False
        self._sequence[child] += 1
        self._sampling[child] = self._sampling[parent]

    def set_block(self, slot: int, index: int, block: int) -> None:
        """Appends to a block table or replaces an entry. Raises PlanError."""
        if not self.live[slot] or not 0 <= index <= self.num_blocks[slot]:
            raise PlanError(f"table entry {index} of slot {slot}: not within or next to its table")
        if index >= self.blocks.shape[1]:
            raise PlanError(f"table entry {index} of slot {slot}: beyond {self.blocks.shape[1]} blocks")
        self.blocks[slot, index] = block
        self.num_blocks[slot] = max(int(self.num_blocks[slot]), index + 1)

    def push(self, slots: Int32s, tokens: Int32s) -> None:
        """Adds the tokens that the control plane has chosen. Raises PlanError."""
        if not self.live[slots].all() or len(np.unique(slots)) != len(slots):
            raise PlanError("push: a slot holds no sequence, or occurs twice")
        self._check_ids(tokens, "push: tokens")
        self.append(slots, tokens)

    def append(self, slots: Int32s, tokens: Int32s) -> None:
        """Adds a token to each slot. Raises PlanError where there is no room."""
        self.settle(self.reserve(slots), tokens)

    def reserve(self, slots: Int32s) -> "Places":
        """Makes each slot one token longer; `settle` brings the tokens. Raises PlanError."""
        lengths = self.lengths[slots]
        if len(slots) and int(lengths.max()) > self.max_model_len:
            raise PlanError(f"a draw is beyond the limit of {self.max_model_len} tokens")
        self.lengths[slots] = lengths + 1
        self.late[slots] = True
        return Places(slots, lengths, self._sequence[slots])

    def settle(self, places: "Places", tokens: Int32s) -> None:
        """Stores the tokens of `reserve`, but for those whose slots were freed meanwhile."""
        same = self._sequence[places.slots] == places.sequences
        slots, positions = places.slots[same], places.positions[same]
        self.tokens[slots, positions] = tokens[same]
        self.late[slots[self.lengths[slots] == positions + 1]] = False


def edits_logits(sampling: Sampling) -> bool:
    """Whether any rule changes single logits before a draw."""
    return bool(
        len(sampling.bias_ids)
        or sampling.min_tokens > 0
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def is_plain(sampling: Sampling) -> bool:
    """Whether a draw is the likeliest token, and that token all that is asked for."""
    asks_more = sampling.logprobs is not None or sampling.candidates > 0
    return sampling.temperature == 0 and not asks_more and not edits_logits(sampling)


def _check_sampling(sampling: Sampling, place: str) -> None:
    """Bounds that keep one row's arithmetic finite; the gateway has checked the user's limits."""
    if len(sampling.bias_ids) != len(sampling.bias_values):
        raise PlanError(f"{place} sampling.bias_ids: not as long as bias_values")
    if len(np.unique(sampling.bias_ids)) != len(sampling.bias_ids):
        raise PlanError(f"{place} sampling.bias_ids: an id occurs twice")
    if not np.isfinite(sampling.bias_values).all():
        raise PlanError(f"{place} sampling.bias_values: not finite")
    if not 0 <= sampling.seed < 1 << 64:
        raise PlanError(f"{place} sampling.seed: not in [0, 2^64)")
    for name, low, high in _LIMITS:
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:  # NaN fails both
            raise PlanError(f"{place} sampling.{name}: not in [{low}, {high}]")
    if sampling.top_p == 0 or sampling.repetition_penalty == 0:
        raise PlanError(f"{place} sampling.top_p or repetition_penalty: not above 0")


_LIMITS = (
    ("temperature", 0.0, 1e6),
    ("top_k", -1, 1 << 31),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 1e6),
    ("presence_penalty", -1e3, 1e3),
    ("frequency_penalty", -1e3, 1e3),
    ("min_tokens", 0, 1 << 31),
    ("candidates", 0, 1 << 16),
    ("logprobs", 0, 1 << 20),
    ("prompt_logprobs", 0, 1 << 20),
)
