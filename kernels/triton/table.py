"""The table of the Triton kernels."""

from dataclasses import replace

from octavo.kernels.cpu.sampling import top_ids
from octavo.kernels.table import REFERENCE
from octavo.kernels.triton import kv_write, paged_attention, rms_norm, rotary, sampling
from octavo.kernels.triton.block_copy import block_copy
from octavo.kernels.triton.block_swap import block_gather, block_scatter, block_swap
from octavo.kernels.triton.silu_mul import silu_mul

# Matrix products stay with the vendor's library, which `linear` of the reference calls.
TRITON = replace(
    REFERENCE,
    prepare_attention=paged_attention.prepare_attention,
    paged_attention=paged_attention.paged_attention,
    prepare_kv_write=kv_write.prepare_kv_write,
    kv_write=kv_write.kv_write,
    rotary_kv_write=rotary.rotary_kv_write,
    block_copy=block_copy,
    block_gather=block_gather,
    block_scatter=block_scatter,
    block_swap=block_swap,
    rms_norm=rms_norm.rms_norm,
    add_rms_norm=rms_norm.add_rms_norm,
    silu_mul=silu_mul,
    rotary=rotary.rotary,
    sample=sampling.sample,
    log_normalizer=sampling.log_normalizer,
    top_ids=top_ids,  # plain torch that sorts no whole vocabulary, as good on any device
)
