"""The benchmark itself: both sides send what a point more takes. Nothing is asserted by the clock."""

from pathlib import Path

import charts


def test_both_sides_append_and_plotly_sends_all_of_it(tmp_path: Path) -> None:
    run = charts.run_of(tmp_path, 300)
    row = charts.kernel(run, 3)
    run.close()
    assert 36 < row["mmlab_bytes"] < 200
    assert row["plotly_bytes"] > 3 * 300 * (8 + 4)
    assert min(row["mmlab_ms"], row["plotly_ms"]) > 0
    assert row["bytes_ratio"] == row["plotly_bytes"] / row["mmlab_bytes"]
