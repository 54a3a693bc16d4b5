"""The benchmark itself: every compressor runs, alone and on ranks. Nothing is asserted by the clock."""

import coded_sums
import pytest


@pytest.mark.slow
def test_every_compressor_is_measured():
    single = coded_sums.alone(0.16, rounds=2)
    rows = coded_sums.together([2], ["shm", "gloo"], 0.16, rounds=1)
    assert [row["codec"] for row in single] == list(coded_sums.CODECS)
    assert [row["side"] for row in rows] == 2 * list(coded_sums.SIDES)
    sent = {row["side"]: row["sent"] for row in rows}
    assert sent["none"] == 160_000  # an all-reduce is handed the whole bucket, coded chunks are half of it, twice
    assert sent["bf16"] == 80_000 > sent["int8"] > sent["onebit"] > sent["topk"] > 0
    assert sent["powersgd 1"] == 8 * (20 + 250) * 4
    assert sent["powersgd 4"] == 4 * sent["powersgd 1"]
    assert rows[0]["ratio"] == rows[len(coded_sums.SIDES)]["ratio"] == 1.0
    text = coded_sums.table(single, rows).splitlines()
    assert len(text) == 3 + len(single) + len(rows)
    assert text[-1].split()[:4] == ["2", "gloo", "powersgd", "16"]
