"""Ranks and tensors."""
