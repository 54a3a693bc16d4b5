"""The benchmark itself: every compressor runs, alone and on ranks. Nothing is asserted by the clock."""

import coded_sums
import pytest


@pytest.mark.slow
def test_every_compressor_is_measured():
    single = coded_sums.alone(0.1, rounds=2)
    rows = coded_sums.together([2], 0.1, rounds=1)
    assert [row["codec"] for row in single] == list(coded_sums.CODECS)
    assert [row["codec"] for row in rows] == list(coded_sums.NAMES)
    sent = {row["codec"]: row["sent"] for row in rows}
    assert sent["none"] == 100_000  # an all-reduce is handed the whole bucket, coded chunks are half of it, twice
    assert sent["bf16"] == 50_000 > sent["int8"] > sent["powersgd"] > sent["onebit"] > sent["topk"] > 0
    assert rows[0]["ratio"] == 1.0
    text = coded_sums.table(single, rows).splitlines()
    assert len(text) == 3 + len(single) + len(rows)
    assert text[-1].split()[:2] == ["2", "onebit"]
