"""Compiles a variant, and reads from the binary what it takes of the card."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels.check.variants import Variant, variants

_TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Cost:
    """What a compiled kernel takes of the card."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread that registers had no room for
    shared: int  # bytes of a program
    matrix: str  # name of its matrix instructions; empty: none


class BadOutput(Exception):  # noqa: N818 (what happened, for who reads the log)
    """A compiler's tool answered with something that is not understood."""


def compile_variant(variant: Variant) -> Cost:
    """Raises what triton raises where it cannot compile, and BadOutput."""
    kernel = variant.kernel
    attributes = {(index,): [["tt.divisibility", 16]] for index in variant.aligned()}
    source = ASTSource(kernel, variant.signature(), variant.constants, attributes)
    compiled = triton.compile(source, target=_TARGETS[variant.arch.name], options=variant.options)
    shared = int(compiled.metadata.shared)
    if "cubin" in compiled.asm:
        return _nvidia(compiled.asm["cubin"], shared)
    return _amd(compiled.asm["amdgcn"], shared)


def _nvidia(binary: bytes, shared: int) -> Cost:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        code = _cuobjdump("-sass", file.name)
    wide = "HGMMA" if "HGMMA" in code else ""
    matrix = wide or ("HMMA" if "HMMA" in code else "")
    # A thread's stack holds nothing else here: no kernel calls or indexes local arrays.
    return Cost(_number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage), shared, matrix)


def _cuobjdump(option: str, file: str) -> str:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(
        [str(folder / "cuobjdump"), option, file],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=environment,  # it looks for nvdisasm
    )
    return done.stdout


def _amd(text: str, shared: int) -> Cost:
    spilled = _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
    registers = _number(r"\.vgpr_count:\s+(\d+)", text)
    return Cost(registers, spilled, shared, "MFMA" if "v_mfma" in text else "")


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise BadOutput(f"no {pattern} in what the compiler says")
    return int(found[1])


def faults_of(variant: Variant, cost: Cost) -> list[str]:
    """What must not be: spills in attention, too much shared memory, narrow matrix instructions."""
    faults = []
    if variant.is_attention and cost.spilled:
        faults.append(f"spills {cost.spilled} bytes")
    if cost.shared > variant.arch.shared_memory:
        faults.append(f"takes {cost.shared} of {variant.arch.shared_memory} bytes of shared memory")
    if variant.wants_wide_matrix and cost.matrix != "HGMMA":
        faults.append(f"multiplies with {cost.matrix or 'scalars'} instead of HGMMA")
    return faults


def as_record(variant: Variant, cost: Cost) -> dict[str, Any]:
    """A line of the report."""
    return {
        "arch": variant.arch.name,
        "kernel": variant.name,
        "variant": variant.label,
        "family": variant.family,
        "dtype": variant.dtype,
        "tile": variant.tile,
        "num_warps": variant.options["num_warps"],
        "num_stages": variant.options.get("num_stages", ""),
        "registers": cost.registers,
        "spilled_bytes": cost.spilled,
        "shared_bytes": cost.shared,
        "matrix": cost.matrix,
        "faults": faults_of(variant, cost),
    }


def check(index: int) -> dict[str, Any]:
    """Compiles one variant, by its place among all of them: kernels do not travel between processes."""
    variant = list(variants())[index]
    return as_record(variant, compile_variant(variant))
