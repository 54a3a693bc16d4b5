"""Thin views of the lab."""
