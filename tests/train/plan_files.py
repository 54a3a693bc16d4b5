"""The plans of tests/plans and what their comments say about them."""

from pathlib import Path

PLANS = sorted((Path(__file__).parents[1] / "plans").glob("*.toml"))
"""One layout each; the first line says what it covers, the second the tier, a third may name the data."""


def said(path, key, default=""):
    """What a plan's comments say about a key ("# tier: quick")."""
    lines = [line for line in path.read_text().splitlines() if line.startswith(f"# {key}: ")]
    return lines[0].split(": ", 1)[1] if lines else default
