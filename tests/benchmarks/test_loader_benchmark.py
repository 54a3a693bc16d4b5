"""The benchmark itself, on small pictures: every side whose library is there gives batches. No clock is asserted."""

import importlib.util
import json

import loader
import numpy as np
import pytest
from PIL import Image


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("default")  # libraries that are compared warn of what they do
def test_every_side_is_measured_and_the_report_can_be_read(tmp_path, monkeypatch, workers):
    monkeypatch.setenv("MMLAB_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "TARGET", 32)
    random = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(3):
        pixels = random.integers(0, 256, (90, 120, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.jpg")
    report = tmp_path / "report.json"
    small = ("--sizes", "80x60", "--rounds", "2", "--seconds", "0.01", "--batch", "4", "--json", str(report))
    loader.main(["--photos", str(tmp_path / "photos"), "--workers", str(workers), *small])
    rows = {row["side"]: row for row in json.loads(report.read_text())["rows"]}
    has_dali = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None
    assert set(rows) == {"bare", "ours", "webdataset", "files", "packed"} | ({"dali"} if has_dali else set())
    assert all(row["images_per_s"] > 0 and row["processor_ms"] >= 0 for row in rows.values())
    assert rows["ours"]["to_webdataset"].keys() == {"clock", "used"}
