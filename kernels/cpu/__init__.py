"""Implementations for CPUs of those operations whose reference is too slow there."""
