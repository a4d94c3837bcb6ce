"""One file per operation, plain torch, right on any device and in float64: the definitions."""
