"""The benchmarks over a link: every side runs, and bytes are those of the formula. Nothing is timed."""

import link
import link_exchanges
import pytest
from two_hosts import possible

SMALL = ("model.language.layers=1", "model.language.hidden=64")


def test_gains_are_of_medians_of_the_slower_rank_and_beside_what_bytes_predict():
    def found(seconds, sent):
        return {"seconds": seconds, "cpu": seconds, "sent": sent, "handed": sent}

    ranks = [
        {"dense": found([1.0, 3.0, 2.0], 1e6), "alone": found([0.2, 0.2, 0.2], 0.0), "fp16": found([1.5] * 3, 5e5)},
        {"dense": found([4.0, 1.0, 2.0], 2e6), "alone": found([0.4, 0.1, 0.4], 0.0), "fp16": found([1.0] * 3, 1e6)},
    ]
    dense, alone, half = link.in_rows(ranks, bits=1e7)
    assert (dense["ms"], dense["gain"], dense["by_bytes"], dense["sent_mb"]) == (3000.0, 1.0, 1.0, 2.0)
    assert alone["ms"] == 400.0
    assert half["gain"] == 2.0
    assert half["by_bytes"] == pytest.approx((0.4 + 1.6) / (0.4 + 0.8))
    assert half["reached"] == pytest.approx(2.0 / half["by_bytes"])
    assert len(link.table([dense, alone, half]).splitlines()) == 4


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("collectives", ["gloo", "shm"])
def test_every_side_takes_its_steps(collectives):
    rows = link.measure("none", 1, 1, *SMALL, f"cluster.collectives={collectives}", data="shapes")
    by_side = {row["side"]: row for row in rows}
    peers = link.PEERS if collectives == "gloo" else link.PEERS[:-1]
    assert list(by_side) == ["dense", "exchanged", "alone", *link.COMPRESSORS, *peers]
    dense = by_side["dense"]["handed_mb"]
    assert by_side["exchanged"]["handed_mb"] == dense
    assert by_side["alone"]["handed_mb"] == 0
    assert by_side["bf16"]["handed_mb"] == pytest.approx(dense / 2, rel=1e-3)
    assert by_side["powersgd"]["handed_mb"] < dense / 4


@possible
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_link_carries_what_is_handed_over():
    rows = link.measure("1gbit", 1, 1, *SMALL, "cluster.collectives=gloo", data="shapes")
    by_side = {row["side"]: row for row in rows}
    for side in ("dense", "exchanged", "bf16"):
        assert by_side[side]["handed_mb"] < by_side[side]["sent_mb"] < 1.2 * by_side[side]["handed_mb"]
    assert by_side["DDP"]["sent_mb"] == pytest.approx(by_side["dense"]["sent_mb"], rel=0.1)
    assert by_side["DDP fp16"]["sent_mb"] == pytest.approx(by_side["fp16"]["sent_mb"], rel=0.1)


@possible
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ways_to_sum_are_compared():
    rows = link_exchanges.measure("1gbit", [0.5], 1, alternate=False)
    assert rows[0]["way"] == "all_reduce"
    assert len(rows) == 5
    (row,) = link_exchanges.measure("1gbit", [0.5], 1, alternate=True)
    assert row["link_ms"] == pytest.approx(12.0)
