"""Weights from files to tensors, under Hugging Face's names."""
