"""The operations of the data plane: tensors and block ids in, tensors out.

`reference` defines each operation in plain torch, `cpu` holds faster implementations where they pay,
and `table` says which one a device uses.
"""
