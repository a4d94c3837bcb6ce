"""The operations of the data plane: tensors and block ids in, tensors out.

`reference` defines each operation in plain torch, `cpu` holds faster implementations where they pay,
`triton` those of GPUs, and `table` says which one a device uses. `check` compiles for cards that are
not here.
"""
