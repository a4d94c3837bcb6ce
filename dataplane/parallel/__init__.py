"""Tensor parallelism: the ranks of a gang find one another and compute together."""
