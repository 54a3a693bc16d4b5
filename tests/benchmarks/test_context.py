"""The benchmark itself: every variant runs on every number of ranks. Nothing is asserted by the clock."""

import context
import pytest


@pytest.mark.slow
def test_every_variant_is_measured():
    rows = context.measure([1, 2], [1024], rounds=1)
    assert [row["variant"] for row in rows] == list(context.VARIANTS)
    assert all(row["ms"] > 0 and row["peak_mb"] > 0 for row in rows)
    ring, window = (next(row for row in rows if row["variant"] == name) for name in ("ring", "ring, window"))
    assert window["sent_mb"] < ring["sent_mb"]
    assert len(context.table(rows).splitlines()) == 1 + len(rows)
