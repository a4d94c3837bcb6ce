"""The OpenVINO engine: the fast one on CPUs. What is private to that library is in `adapter`."""
