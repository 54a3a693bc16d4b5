"""Engines and their processes."""
