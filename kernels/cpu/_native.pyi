"""The extension of csrc/. Arrays come as addresses of dense memory, which its callers have checked."""

PANEL: int  # columns of a panel of packed weights
GROUP_BYTES_4: (
    int  # of a panel's group of 32 steps in integers of 4 bits, its scales and offsets included
)
GROUP_BYTES_8: int
OPERATIONS: dict[str, tuple[int, str]]  # index and arguments; csrc/module.c says what the letters mean

def pack(weight: int, out_size: int, in_size: int, panels: int, /) -> None: ...
def linear(
    input: int, rows: int, in_size: int, out_size: int, panels: int, bias: int, output: int, /
) -> None: ...
def pack_grouped(
    integers: int,
    bits: int,
    scales: int,
    zeros: int,
    out_size: int,
    groups: int,
    panels: int,
    /,
) -> None: ...
def linear_grouped(
    input: int,
    rows: int,
    groups: int,
    out_size: int,
    bits: int,
    panels: int,
    bias: int,
    output: int,
    activation_bits: int,
    /,
) -> None: ...
def norm(
    hidden: int,
    residual: int,
    weight: int,
    rows: int,
    size: int,
    epsilon: float,
    normed: int,
    total: int,
    /,
) -> None: ...
def gate(gate_up: int, rows: int, size: int, output: int, /) -> None: ...
def rotary(
    heads: int,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    rotations: int,
    slots: int,
    keys: int,
    values: int,
    query: int,
    /,
) -> None: ...
def attention(
    query: int,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    keys: int,
    values: int,
    rows: int,
    query_begins: int,
    context_lens: int,
    block_indices: int,
    block_begins: int,
    scale: float,
    window: int,
    soft_cap: float,
    output: int,
    /,
) -> None: ...
def argmax(values: int, rows: int, size: int, places: int, /) -> None: ...
def gumbel(
    logits: int,
    rows: int,
    size: int,
    temperatures: int,
    seeds: int,
    positions: int,
    samples: int,
    places: int,
    /,
) -> None: ...
def replay(words: int, count: int, tokens: int, arena: int, given: int, /) -> None:
    """The operations of a `recorded.Program`: `count` words, then what differs between forwards."""

def fault_of_rows(
    query_begins: int,
    context_lens: int,
    block_indices: int,
    block_begins: int,
    rows: int,
    num_indices: int,
    num_blocks: int,
    block_size: int,
    /,
) -> int:
    """0: nothing; 1: a block is not one of `num_blocks`; 2: a block table is too short for its row."""

def set_threads(threads: int, /) -> None:
    """How many threads compute, the caller's included. Raises ValueError beyond 256."""

def instruction_sets() -> list[str]:
    """Those that this processor has, best first."""

def use_instruction_set(name: str, /) -> None:
    """For all operations from now on. Raises ValueError for one that `instruction_sets` lacks."""
