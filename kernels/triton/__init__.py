"""The operations in Triton, for GPUs, and for CPUs in Triton's interpreter (``TRITON_INTERPRET=1``).

One file per kernel; a wrapper checks the layout, computes the grid and launches. `helpers` holds what
kernels share, `arch` and `tiles` the rules for launch parameters. Importing a module of this package
imports triton, which reads ``TRITON_INTERPRET`` once: the table does so only when asked for Triton.
"""
