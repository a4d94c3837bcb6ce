#!/usr/bin/env python3
"""Everything that one GPU should be asked, in one script of less than eight minutes.

    python bench/gpu.py --json gpu.json

Needs torch (2.11 or later) with its Triton, and this checkout; nothing else is imported but for the
service's own run, which is left out, and said to be, where a package or the model is missing. Ceilings
are measured in the same run: a device copy, a matrix product, a copy from pinned memory.

With --rehearse it runs at toy sizes on the CPU in Triton's interpreter: that shows that the script
works, and its figures mean nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLANES = ("common", "controlplane", "dataplane", "frontend", "kernels", "proto")


def find_octavo() -> None:
    """Makes this checkout's packages importable where nothing is installed."""
    home = Path(tempfile.mkdtemp(prefix="octavo-gpu-"))
    (home / "octavo").mkdir()
    for name in PLANES:
        (home / "octavo" / name).symlink_to(ROOT / name)
    (home / "octavo" / "v1").symlink_to(ROOT / "proto" / "octavo" / "v1")
    sys.path.insert(0, str(home))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])


find_octavo()
if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from octavo.kernels.reference import paged_attention as attention_reference  # noqa: E402
from octavo.kernels.rows import PLAIN, AttentionForm, AttentionRows, KvScales  # noqa: E402
from octavo.kernels.table import REFERENCE, kernels_named  # noqa: E402


@dataclass(frozen=True)
class Sizes:
    """How large everything is: of a card, or of the rehearsal."""

    device: str
    dtype: torch.dtype
    copy_bytes: int
    matmul: int
    decodes: list[tuple[int, int]]  # sequences, context
    prefills: list[int]
    heads: tuple[int, int, int]  # query heads, KV heads, head size
    steps: list[int]  # sequences of a decode step of a whole model
    context: int  # of those steps
    model: dict[str, int]
    swap_blocks: int
    tries: int


# Shapes of Llama 3.2 1B and, for attention alone, of Llama 3.1 8B.
CARD = Sizes(
    device="cuda",
    dtype=torch.bfloat16,
    copy_bytes=1 << 30,
    matmul=8192,
    decodes=[(1, 32_768), (16, 4096), (64, 2048), (256, 1024)],
    prefills=[512, 2048, 8192],
    heads=(32, 8, 128),
    steps=[1, 2, 4, 8, 16, 32, 64, 128, 256],
    context=512,
    model={"layers": 16, "hidden": 2048, "inner": 8192, "heads": 32, "kv_heads": 8, "vocab": 128_256},
    swap_blocks=1024,
    tries=20,
)
# The interpreter multiplies bfloat16 wrongly, hence float16.
TOY = Sizes(
    device="cpu",
    dtype=torch.float16,
    copy_bytes=1 << 20,
    matmul=64,
    decodes=[(2, 40)],
    prefills=[24],
    heads=(4, 2, 64),
    steps=[1, 2],
    context=20,
    model={"layers": 2, "hidden": 64, "inner": 96, "heads": 4, "kv_heads": 2, "vocab": 300},
    swap_blocks=4,
    tries=1,
)


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    part: str
    case: str
    value: float | None
    unit: str
    ceiling: float | None = None  # in the same unit
    note: str = ""

    @property
    def share(self) -> str:
        if self.value is None or not self.ceiling:
            return ""
        return f"{self.value / self.ceiling:.0%}"


# -- time --------------------------------------------------------------------------------------------


def synchronize(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        torch.cuda.synchronize()


def seconds(sizes: Sizes, work: Callable[[], object], repeats: int = 10) -> float:
    """Median over tries of the time of one call, several in a row, after two that do not count."""
    work()
    work()
    rounds = []
    for _ in range(sizes.tries):
        synchronize(sizes)
        begin = time.perf_counter()
        for _ in range(repeats if sizes.tries > 1 else 1):
            work()
        synchronize(sizes)
        rounds.append((time.perf_counter() - begin) / (repeats if sizes.tries > 1 else 1))
    return statistics.median(rounds)


# -- ceilings ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ceilings:
    copy: float  # bytes per second, read and written, on the device
    matmul: float  # operations per second in the compute type
    bus: float  # bytes per second from pinned memory to the device


def measure_ceilings(sizes: Sizes) -> Ceilings:
    source = torch.ones(sizes.copy_bytes // 4, device=sizes.device)
    target = torch.empty_like(source)
    copy = 2 * sizes.copy_bytes / seconds(sizes, lambda: target.copy_(source), 3)
    host = torch.ones(sizes.copy_bytes // 4, pin_memory=sizes.device == "cuda")
    bus = sizes.copy_bytes / seconds(sizes, lambda: target.copy_(host, non_blocking=True), 2)
    left = torch.randn(sizes.matmul, sizes.matmul, device=sizes.device).to(sizes.dtype)
    matmul = 2 * sizes.matmul**3 / seconds(sizes, lambda: left @ left, 3)
    return Ceilings(copy, matmul, bus)


# -- inputs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    rows: AttentionRows


def attention_case(
    mix: list[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    device: str,
) -> Case:
    """Rows of (context, queries) with permuted block tables, NaN where no token lies."""
    num_heads, kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(7)
    counts = [-(-(context + queries) // block_size) for context, queries in mix]
    order = torch.from_numpy(np.random.default_rng(3).permutation(sum(counts) + 5)[: sum(counts)])
    ends = np.cumsum(counts)
    caches = []
    for _ in range(2):
        shape = (sum(counts) + 5, kv_heads, block_size, head_dim)
        cache = torch.full(shape, float("nan"), dtype=dtype)
        cache[order] = torch.randn(sum(counts), *shape[1:], generator=generator).to(dtype)
        for (context, queries), end in zip(mix, ends, strict=True):
            used = (context + queries) % block_size
            if used:
                cache[order[end - 1], :, used:] = float("nan")
        caches.append(cache.to(device))
    query_counts = [queries for _, queries in mix]
    query = torch.randn(sum(query_counts), num_heads, head_dim, generator=generator).to(dtype)
    rows = AttentionRows(
        query_begins=torch.tensor([0, *np.cumsum(query_counts)], device=device),
        context_lens=torch.tensor([context for context, _ in mix], device=device),
        block_indices=order.to(device),
        block_begins=torch.tensor([0, *ends], device=device),
    )
    return Case(query.to(device), caches[0], caches[1], rows)


# -- correctness -------------------------------------------------------------------------------------

MIXES = {
    "decodes": [(0, 1), (1, 1), (15, 1), (16, 1), (150, 1), (1500, 1)],
    "chunks": [(0, 15), (0, 17), (16, 3), (1, 40), (700, 200)],
    "mixed": [(90, 1), (0, 33), (0, 0), (2000, 1), (16, 16)],
}
SHAPES = [  # query heads, KV heads, head size, block size
    (2, 2, 64, 16),
    (6, 2, 80, 8),
    (8, 2, 128, 32),
    (7, 1, 96, 16),
    (8, 1, 128, 128),
    (4, 2, 256, 16),
]
FORMS = {
    "plain": PLAIN,
    "window": AttentionForm(window=37),
    "soft cap": AttentionForm(soft_cap=20.0),
}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    difference = (found.double().cpu() - wanted.double().cpu()).norm()
    return float(difference / wanted.double().cpu().norm())


def correctness(sizes: Sizes, kernels: Any) -> Iterator[Figure]:
    shapes = SHAPES if sizes.tries > 1 else SHAPES[:1]
    mixes = MIXES if sizes.tries > 1 else {"mixed": [(20, 1), (0, 5), (0, 0)]}
    for form_name, form in FORMS.items():
        errors = [
            attention_error(mix, shape, form, sizes, kernels)
            for mix in mixes.values()
            for shape in shapes
        ]
        yield Figure("correct", f"attention, {form_name}", max(errors), "error", 2e-2)
    yield from layer_errors(sizes, kernels)
    yield cache_error(sizes, kernels)
    yield sampling_agreement(sizes, kernels)
    yield from copies(sizes, kernels)


def attention_error(
    mix: list[tuple[int, int]],
    shape: tuple[int, int, int, int],
    form: AttentionForm,
    sizes: Sizes,
    kernels: Any,
) -> float:
    *heads, block_size = shape
    case = attention_case(mix, (heads[0], heads[1], heads[2]), block_size, sizes.dtype, sizes.device)
    rows = kernels.prepare_attention(case.rows, case.key_cache)
    found = kernels.paged_attention(case.query, case.key_cache, case.value_cache, rows, 0.1, form)
    wanted = attention_reference.paged_attention(
        case.query.double(), case.key_cache.double(), case.value_cache.double(), case.rows, 0.1, form
    )
    return relative_error(found, wanted)


def layer_errors(sizes: Sizes, kernels: Any) -> Iterator[Figure]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(sizes.device, sizes.dtype)

    hidden, residual, weight = normal(33, 576), normal(33, 576), normal(576)
    normed, total = kernels.add_rms_norm(hidden, residual, weight, 1e-5)
    wanted = REFERENCE.add_rms_norm(hidden.double(), residual.double(), weight.double(), 1e-5)
    errors = [relative_error(normed, wanted[0]), relative_error(total, wanted[1])]
    plain = REFERENCE.rms_norm(hidden.double(), weight.double(), 1e-5)
    errors.append(relative_error(kernels.rms_norm(hidden, weight, 1e-5), plain))
    yield Figure("correct", "RMSNorm, with residual", max(errors), "error", 2e-2)
    gates = normal(33, 2 * 1536)
    error = relative_error(kernels.silu_mul(gates), REFERENCE.silu_mul(gates.double()))
    yield Figure("correct", "SiLU * up", error, "error", 2e-2)
    heads, turns = normal(33, 12, 64), normal(33, 64)
    error = relative_error(
        kernels.rotary(heads, turns), REFERENCE.rotary(heads.double(), turns.double())
    )
    yield Figure("correct", "rotary", error, "error", 2e-2)


def cache_error(sizes: Sizes, kernels: Any) -> Figure:
    """Writes some tokens; what must not change is compared bit by bit, fp8 with scales too."""
    generator = torch.Generator().manual_seed(2)
    worst = 0.0
    for dtype in (sizes.dtype, torch.float8_e4m3fn):
        keys = torch.randn(9, 2, 64, generator=generator).to(sizes.device, sizes.dtype)
        caches = [torch.zeros(8, 2, 16, 64, device=sizes.device).to(dtype) for _ in range(4)]
        slots = torch.tensor([5, -1, 17, 120, 3, -1, 64, 65, 66], device=sizes.device)
        factors = torch.tensor([0.5, 2.0], device=sizes.device)
        scales = KvScales(factors, factors) if dtype is torch.float8_e4m3fn else None
        for table, (key_cache, value_cache) in ((kernels, caches[:2]), (REFERENCE, caches[2:])):
            prepared = table.prepare_kv_write(slots, key_cache)
            table.kv_write(keys, keys, key_cache, value_cache, prepared, scales)
        for ours, theirs in zip(caches[:2], caches[2:], strict=True):
            worst = max(worst, float((ours.float() - theirs.float()).abs().max()))
    return Figure("correct", "KV write, with fp8", worst, "difference", None, "exact is 0")


def sampling_agreement(sizes: Sizes, kernels: Any) -> Figure:
    from octavo.kernels.reference.sampling import DrawParams

    rows, vocab = (64, 50_000) if sizes.tries > 1 else (2, 300)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 3
    params = DrawParams(
        temperature=torch.full((rows,), 0.9),
        top_k=torch.full((rows,), 0, dtype=torch.int64),
        top_p=torch.full((rows,), 0.9, dtype=torch.float64),
        min_p=torch.zeros(rows, dtype=torch.float64),
        seeds=torch.arange(rows),
        positions=torch.arange(rows) + 10,
        samples=torch.zeros(rows, dtype=torch.int64),
    )
    wanted = REFERENCE.sample(logits, params)
    there = DrawParams(**{name: value.to(sizes.device) for name, value in vars(params).items()})
    found = kernels.sample(logits.to(sizes.device), there).cpu()
    same = float((found == wanted).double().mean())
    return Figure("correct", "same tokens drawn as on the CPU", same, "share", 1.0)


def copies(sizes: Sizes, kernels: Any) -> Iterator[Figure]:
    pools = [torch.randn(12, 2, 16, 64).to(sizes.device, sizes.dtype) for _ in range(4)]
    twins = [pool.clone() for pool in pools]
    sources = torch.tensor([1, 1, 7], device=sizes.device)
    destinations = torch.tensor([3, 9, 0], device=sizes.device)
    kernels.block_copy(pools, sources, destinations)
    REFERENCE.block_copy(twins, sources, destinations)
    staging = kernels.block_gather(pools, destinations)
    same = torch.equal(staging, REFERENCE.block_gather(twins, destinations))
    kernels.block_scatter(staging, pools, sources[1:].new_tensor([5, 6, 2]))
    REFERENCE.block_scatter(staging, twins, sources[1:].new_tensor([5, 6, 2]))
    same = same and all(torch.equal(a, b) for a, b in zip(pools, twins, strict=True))
    yield Figure("correct", "block copy, gather, scatter", float(same), "share", 1.0)


# -- speed of kernels --------------------------------------------------------------------------------


def attention_speed(sizes: Sizes, ceilings: Ceilings, kernels: Any) -> Iterator[Figure]:
    heads, kv_heads, head_dim = sizes.heads
    for sequences, context in sizes.decodes:
        case = attention_case(
            [(context - 1, 1)] * sequences, sizes.heads, 16, sizes.dtype, sizes.device
        )
        spent = seconds(sizes, lambda case=case: attend(case, kernels))
        moved = 2 * sequences * context * kv_heads * head_dim * sizes.dtype.itemsize
        name = f"decode, {sequences} x {context}"
        yield Figure("attention", name, moved / spent / 1e9, "GB/s", ceilings.copy / 1e9)
    for tokens in sizes.prefills:
        case = attention_case([(0, tokens)], sizes.heads, 16, sizes.dtype, sizes.device)
        spent = seconds(sizes, lambda case=case: attend(case, kernels))
        work = 4 * heads * head_dim * tokens * (tokens + 1) / 2
        yield Figure(
            "attention", f"prefill, {tokens}", work / spent / 1e12, "TFLOP/s", ceilings.matmul / 1e12
        )


def attend(case: Case, kernels: Any) -> Tensor:
    rows = kernels.prepare_attention(case.rows, case.key_cache)
    attended: Tensor = kernels.paged_attention(case.query, case.key_cache, case.value_cache, rows, 0.1)
    return attended


# -- a whole model -----------------------------------------------------------------------------------


def random_model(sizes: Sizes, folder: Path) -> str:
    """A Llama of random weights on disk, written as safetensors lays tensors out."""
    shape = sizes.model
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape["vocab"],
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["inner"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors_of(shape))
    return str(folder)


def tensors_of(shape: dict[str, int]) -> dict[str, tuple[int, ...]]:
    hidden, inner = shape["hidden"], shape["inner"]
    kv = shape["kv_heads"] * (hidden // shape["heads"])
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape["vocab"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(shape["layers"]):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": (hidden, hidden),
            f"{name}.self_attn.k_proj.weight": (kv, hidden),
            f"{name}.self_attn.v_proj.weight": (kv, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, hidden),
            f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, inner),
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
        }
    return tensors


def write_safetensors(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """Random bfloat16 values: a length, a JSON header, then the tensors one after the other."""
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in tensors.values():
            values = torch.randn(shape, generator=generator) * (0.02 if len(shape) > 1 else 1.0)
            file.write(values.to(torch.bfloat16).view(torch.int16).numpy().tobytes())


def model_speed(sizes: Sizes, ceilings: Ceilings) -> Iterator[Figure]:
    from octavo.common.modelfiles import open_model
    from octavo.dataplane.engines.torch_engine import TorchEngine

    dtype = "bfloat16" if sizes.device == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as folder:
        files = open_model(random_model(sizes, Path(folder)))
        device = "cuda:0" if sizes.device == "cuda" else "cpu"
        kernels = kernels_named("triton", sizes.device)
        engine = TorchEngine(files, device, dtype, kernels)
    weights = sum(2 * int(np.prod(shape)) for shape in tensors_of(sizes.model).values())
    per_sequence = -(-(sizes.context + 64) // 16)
    num_blocks = max(sizes.steps) * per_sequence + sizes.swap_blocks
    engine.make_pools(num_blocks, 16, sizes.swap_blocks)
    token_bytes = engine.describe().token_bytes
    engine.warm_up(max(sizes.steps))
    for graphs in (True, False):
        if not graphs:
            engine.drop_graphs()
        for sequences in sizes.steps:
            batch = decode_batch(sequences, sizes.context, per_sequence)
            spent = seconds(sizes, lambda batch=batch: engine.logits(engine.forward(batch)))
            floor = (weights + sequences * sizes.context * token_bytes) / (ceilings.copy / 2)
            name = f"step of {sequences} x {sizes.context}, {'graph' if graphs else 'no graph'}"
            yield Figure(
                "model", name, spent * 1e3, "ms", None, f"memory alone takes {floor * 1e3:.2f}"
            )
    yield from swap_speed(sizes, ceilings, engine, per_sequence, num_blocks)


def decode_batch(sequences: int, context: int, per_sequence: int) -> Any:
    from octavo.dataplane.engine import Batch

    def ints(values: Any) -> Any:
        return np.asarray(values, dtype=np.int32)

    used = -(-(context + 1) // 16)
    order = np.random.default_rng(1).permutation(sequences * per_sequence).reshape(sequences, -1)
    tables = order[:, :used]
    return Batch(
        token_ids=ints(np.full(sequences, 5)),
        positions=ints(np.full(sequences, context)),
        kv_slots=ints(tables[:, context // 16] * 16 + context % 16),
        query_begins=ints(range(sequences + 1)),
        context_lens=ints(np.full(sequences, context)),
        block_indices=ints(tables.ravel()),
        block_begins=ints(np.arange(sequences + 1) * used),
        logit_tokens=ints(range(sequences)),
    )


def swap_speed(
    sizes: Sizes, ceilings: Ceilings, engine: Any, per_sequence: int, num_blocks: int
) -> Iterator[Figure]:
    count = sizes.swap_blocks
    pairs = np.stack([np.arange(num_blocks - count, num_blocks), np.arange(count)], axis=1)
    out = pairs.astype(np.int32).ravel()
    back = pairs[:, ::-1].astype(np.int32).ravel()
    moved = count * 16 * engine.describe().token_bytes
    for name, move in (("out", lambda: engine.swap_out(out)), ("in", lambda: engine.swap_in(back))):
        spent = seconds(sizes, move, 2)
        yield Figure("swap", name, moved / spent / 1e9, "GB/s", ceilings.bus / 1e9)
    batch = decode_batch(max(sizes.steps), sizes.context, per_sequence)

    def steps() -> None:
        for _ in range(8):
            engine.forward(batch)

    def both() -> None:
        engine.swap_out(out)
        steps()

    alone = seconds(sizes, steps, 1)
    swap = seconds(sizes, lambda: engine.swap_out(out), 1)
    together = seconds(sizes, both, 1)
    hidden = (alone + swap - together) / min(alone, swap)
    note = f"steps {alone * 1e3:.1f} ms, swap {swap * 1e3:.1f} ms, together {together * 1e3:.1f} ms"
    yield Figure("swap", "share of the shorter hidden by the other", hidden, "share", 1.0, note)


# -- the service -------------------------------------------------------------------------------------


def service_run(sizes: Sizes) -> Figure:
    """The golden greedy prompts through gateway, control plane and a worker on the card."""
    name = "golden greedy tokens through the service"
    if sizes.device != "cuda":
        return Figure("service", name, None, "share", 1.0, "left out of the rehearsal")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "tests/system/test_golden.py",
        "-k",
        "all-at-once and not openvino",
    ]
    environment = os.environ | {"OCTAVO_DEVICE": "cuda", "OCTAVO_DTYPE": "float32"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Figure("service", name, None, "share", 1.0, f"left out: {error}")
    last = (done.stdout.strip().splitlines() or ["nothing"])[-1]
    if done.returncode == 0 and "skipped" not in last:
        return Figure("service", name, 1.0, "share", 1.0, last)
    missing = "No module named" in done.stdout + done.stderr or "skipped" in last
    return Figure("service", name, None if missing else 0.0, "share", 1.0, last)


# -- all ---------------------------------------------------------------------------------------------


def run(sizes: Sizes) -> tuple[Ceilings, list[Figure]]:
    kernels = kernels_named("triton", sizes.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    ceilings = measure_ceilings(sizes)
    parts: list[tuple[str, Callable[[], Iterator[Figure]]]] = [
        ("correct", lambda: correctness(sizes, kernels)),
        ("attention", lambda: attention_speed(sizes, ceilings, kernels)),
        ("model", lambda: model_speed(sizes, ceilings)),
        ("service", lambda: iter([service_run(sizes)])),
    ]
    figures: list[Figure] = []
    for name, part in parts:
        begin = time.perf_counter()
        try:
            for figure in part():
                figures.append(figure)
                print(line(figure), flush=True)
        except Exception as error:  # one part that fails must not cost the others' figures
            figures.append(Figure(name, "FAILED", None, "", None, f"{type(error).__name__}: {error}"))
            print(line(figures[-1]), flush=True)
        print(f"-- {name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return ceilings, figures


def line(figure: Figure) -> str:
    value = "-" if figure.value is None else f"{figure.value:.4g}"
    ceiling = "" if figure.ceiling is None else f"of {figure.ceiling:.4g} {figure.share}"
    return f"{figure.part:10} {figure.case:44} {value:>10} {figure.unit:8} {ceiling:18} {figure.note}"


def failed(figure: Figure) -> bool:
    if figure.case == "FAILED":
        return True
    if figure.part not in ("correct", "service") or figure.value is None:
        return False
    if figure.unit == "share":
        return figure.value < 1.0
    return figure.value > (figure.ceiling or 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        print("no GPU here; --rehearse runs the script at toy sizes", file=sys.stderr)
        return 2
    sizes = TOY if options.rehearse else CARD
    card = "none, rehearsal" if options.rehearse else torch.cuda.get_device_name()
    print(f"card: {card}; torch {torch.__version__}")
    ceilings, figures = run(sizes)
    if options.json:
        report = {
            "card": card,
            "torch": torch.__version__,
            "ceilings": asdict(ceilings),
            "figures": [asdict(figure) for figure in figures],
        }
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(map(failed, figures)) else 0


if __name__ == "__main__":
    sys.exit(main())
