"""What kernels can do that record a run of operations and later repeat it as one call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class RecordingError(Exception):
    """The run did something that its recording would not repeat. The text says what."""


@dataclass(frozen=True)
class Brought:
    """What a forward brings to its layers, all dense. What else they read outlives it."""

    hidden: Tensor  # [num_tokens, hidden_size]
    rotations: Sequence[Tensor]  # each [num_tokens, head_dim]
    rows: Any  # of the table's prepare_attention
    kv_slots: Any  # of its prepare_kv_write


class Recorded(Protocol):
    """Operations that were recorded."""

    def run(self, brought: Brought) -> tuple[Tensor, ...]:
        """What the recorded run would return for another forward, bit for bit."""


class Record(Protocol):
    """Calls `run`, operations on what `brought` holds, and notes them. Raises RecordingError."""

    def __call__(self, run: Callable[[], tuple[Tensor, ...]], brought: Brought) -> Recorded: ...
