"""Compiles the Triton kernels for cards that are not here, and says what they take of them.

Run as ``python -m octavo.kernels.check``.
"""
