"""Contracts between Octavo's processes: values and their bytes, no logic."""
