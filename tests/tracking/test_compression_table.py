"""The table of compressed gradients, from the events of steps."""

import math

import pytest

from mmlab.tracking.compression import CompressionTable, telling

POWERSGD = {"compressor": "powersgd", "options": {"rank": 4}}


def step(number, coded=None, bytes=(1000, 1000), **more):
    """A step of two ranks a module; `coded` is the compression of the language model's gradients."""
    compression = {"seconds": 0.004, "residual": 3.0, "dense": 8000, "kept": 4000} | more
    return {
        "step": number,
        "grad_norm": {"vision": 1.0, "projector": 0.5, "language": 2.0},
        "traffic": {"vision": [400, 400], "language": list(bytes), "tokens": [10]},
        "communication": {m: {"seconds": 0.02, "exposed": 0.005} for m in ("vision", "language")},
    } | ({} if coded is None else {"compression": {"language": coded | compression}})


def test_a_row_is_the_mean_of_the_last_steps_with_the_same_compressor():
    dense = [step(number, bytes=(4000, 4000)) for number in range(1, 30)]
    steps = [*dense, step(30, POWERSGD, (900, 900)), step(31, POWERSGD, error=0.25), step(32, POWERSGD, (1100, 1100))]
    vision, language = CompressionTable(steps).rows
    assert (vision.module, vision.compressor) == ("vision", "none")
    assert (vision.bytes, vision.dense, vision.ratio) == (800, 800, 1)
    assert (vision.coding, vision.residual, vision.error, vision.kept) == (None, None, None, 0)
    assert (language.compressor, language.options) == ("powersgd", {"rank": 4})
    assert (language.bytes, language.dense, language.ratio) == (pytest.approx(2000), 8000, pytest.approx(4))
    assert (language.seconds, language.exposed, language.coding) == pytest.approx((0.02, 0.005, 0.004))
    assert (language.residual, language.residual_share) == (3.0, 1.5)
    assert (language.error, language.error_step, language.kept) == (0.25, 31, 4000)


def test_what_another_compressor_or_setting_did_does_not_count():
    other = {"compressor": "powersgd", "options": {"rank": 8}}
    row = CompressionTable([step(1, POWERSGD, error=0.5), step(2, other, (500, 500))]).rows[1]
    assert (row.options, row.bytes, row.error, row.error_step) == ({"rank": 8}, 1000, None, None)
    kept = {"compressor": "none", "options": {}}  # what the compressor before has left out waits for another one
    row = CompressionTable([step(1, POWERSGD), step(2, kept, (4000, 4000))]).rows[1]
    assert (row.compressor, row.bytes, row.residual, row.coding) == ("none", 8000, 3.0, None)


def test_no_more_steps_are_read_than_it_tells_of():
    other = {"compressor": "powersgd", "options": {"rank": 8}}
    dense = [step(number) for number in range(1, 30)]
    coded = [step(number, POWERSGD) for number in range(31, 60)]
    for before, first in (([step(30, POWERSGD, error=0.25)], 30), ([step(30, other, error=0.5)], 40), ([], 40)):
        steps = [*dense, *before, *coded]
        read = []
        found = telling(read.append(one["step"]) or one for one in reversed(steps))
        assert found[0]["step"] == first
        assert read[-1] >= 29
        assert CompressionTable(found).rows == CompressionTable(steps).rows
    assert telling([]) == []


def test_it_shows_as_text_and_html():
    table = CompressionTable([step(1), step(2, POWERSGD, error=0.25)])
    text = str(table)
    for part in ("powersgd", "2 kB", "of 8 kB", "4 x less", "of 20.00 ms", "coding 4.00 ms", "1.5 of norm",
                 "0.25", "step 2", "gradient norm of vision / language: 0.5"):  # fmt: skip
        assert part in text
    assert "rank" not in text  # 4 is the default
    assert max(map(len, text.splitlines())) <= 80
    bundle = table._repr_mimebundle_()
    assert bundle["text/plain"] == text
    assert bundle["text/html"].count("<tr") == 3


def test_without_numbers_it_says_so():
    assert "no step has ended" in str(CompressionTable([]))
    text = {"step": 1, "grad_norm": {"vision": 0.0, "language": None}, "traffic": {"pp": [1]}}
    table = CompressionTable([text])
    assert (table.rows, table.norms) == ([], None)
    assert "has one rank" in table._repr_mimebundle_()["text/html"]


def test_a_residual_that_is_not_finite_is_not_shown():
    row = CompressionTable([step(1, POWERSGD, residual=None)]).rows[1]
    assert (row.residual, row.residual_share) == (None, None)
    assert math.isfinite(row.bytes)


def test_a_module_that_is_shared_out_has_a_row_without_bytes_of_its_own():
    coded = {"language": POWERSGD | {"options": {"rank": 16, "error_feedback": False}, "seconds": 0.004,
                                     "residual": 0.5, "dense": 0, "kept": 4000, "error": 0.25}}  # fmt: skip
    found = {"step": 1, "grad_norm": {"language": 2.0}, "traffic": {"sharding": [9]}, "compression": coded}
    (row,) = CompressionTable([found]).rows
    assert (row.bytes, row.seconds, row.coding, row.residual, row.error) == (None, None, 0.004, 0.5, 0.25)
    text = str(CompressionTable([found]))
    assert "with sharding" in text
    assert "rank=16" in text
    assert "no feedback" in text
    assert max(map(len, text.splitlines())) <= 80
