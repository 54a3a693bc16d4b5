"""The messages of views: what is sent, how large, and that nothing of a run is a synced trait."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from array import array
from importlib.resources import files
from typing import Any

import pytest
from ipywidgets import Widget
from jupyter_client.session import json_packer

from mmlab.ui.series import CAPACITY, Series
from mmlab.ui.view import View, code, script, style

Sent = list[tuple[dict[str, Any], list[bytes]]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """What views send."""
    messages: Sent = []
    monkeypatch.setattr(View, "send", lambda _, content, buffers=None: messages.append((content, list(buffers or []))))
    return messages


def decode(buffers: list[bytes], index: int) -> tuple[list[float], list[float]]:
    return list(array("d", buffers[2 * index])), list(array("f", buffers[2 * index + 1]))


def test_history_holds_frame_and_curves(sent: Sent) -> None:
    loss, empty = Series(), Series()
    for step in range(1, 4):
        loss.add(step, step / 2)
    View(["head"], "test").send_history({"head": {"state": "running"}}, {"loss": loss, "held_out": empty})
    content, buffers = sent[0]
    assert content == {
        "kind": "history", "seq": 1, "frames": {"head": {"state": "running"}}, "curves": [["loss", 3], ["held_out", 0]],
    }  # fmt: skip
    assert decode(buffers, 0) == ([1.0, 2.0, 3.0], [0.5, 1.0, 1.5])
    assert decode(buffers, 1) == ([], [])


def test_history_of_a_long_run_is_bounded(sent: Sent) -> None:
    loss = Series()
    for step in range(50_000):
        loss.add(step, math.sin(step))
    View(["head"], "test").send_history({}, {"loss": loss})
    assert sum(map(len, sent[0][1])) <= 12 * (CAPACITY + 2)


def test_ticks_hold_only_what_changed_and_count_up(sent: Sent) -> None:
    view = View(["head"], "test")
    view.send_history({"head": {"state": "running", "step": 1}}, {})
    assert view.send_tick({"head": {"state": "running", "step": 2}}, {"loss": [(2.0, 1.25)]})
    assert not view.send_tick({"head": {"state": "running", "step": 2}}, {"loss": []})
    assert view.send_tick({"head": {"state": "paused", "step": 2}}, {})
    assert [content["seq"] for content, _ in sent] == [1, 2, 3]
    assert sent[1][0]["frames"] == {"head": {"step": 2}}
    assert sent[1][0]["curves"] == [["loss", 1]]
    assert decode(sent[1][1], 0) == ([2.0], [1.25])
    assert sent[2][0]["frames"] == {"head": {"state": "paused"}}
    assert len(json.dumps(sent[1][0])) + sum(map(len, sent[1][1])) < 120


def test_a_list_that_moved_on_is_told_by_what_came(sent: Sent) -> None:
    view = View(["log"], "test")
    lines = [f"line {index}" for index in range(30)]
    for now in (lines[:20], lines[:22], lines[3:25], lines[22:30], []):
        view.send_tick({"log": {"lines": now, "state": "running"}}, {})
    contents = [content for content, _ in sent]
    assert [content.get("moved") for content in contents] == [
        None, {"log": {"lines": [0, lines[20:22]]}}, {"log": {"lines": [3, lines[22:25]]}}, None, None,
    ]  # fmt: skip
    assert [content["frames"] for content in contents[1:]] == [
        {},
        {},
        {"log": {"lines": lines[22:30]}},
        {"log": {"lines": []}},
    ]


def test_curves_are_named_once(sent: Sent) -> None:
    view = View(["charts"], "test")
    view.send_history({}, {"loss": Series()})
    view.send_tick({}, {"loss": [(1.0, 1.0)], "lr.vision": [(1.0, 2.0)]})
    view.send_tick({}, {"lr.vision": [(2.0, 1.0)], "loss": [(2.0, 1.0)]})
    view.send_history({}, {"lr.vision": Series()})
    view.send_tick({}, {"lr.vision": [(3.0, 1.0)]})
    assert [content["curves"] for content, _ in sent] == [
        [["loss", 0]], [[0, 1], ["lr.vision", 1]], [[1, 1], [0, 1]], [["lr.vision", 0]], [[0, 1]],
    ]  # fmt: skip


def test_values_beyond_single_precision_are_infinite_not_an_error(sent: Sent) -> None:
    View(["head"], "test").send_tick({}, {"loss": [(1.0, 1e300), (2.0, -1e300), (3.0, math.nan)]})
    _, values = decode(sent[0][1], 0)
    assert values[:2] == [math.inf, -math.inf]
    assert math.isnan(values[2])


def test_a_text_that_no_message_can_carry_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    carried: list[dict[str, Any]] = []
    monkeypatch.setattr(
        Widget, "send", lambda _, content, buffers=None: carried.append(json.loads(json_packer(content)))
    )
    view = View(["head"], "label")
    view.send_tick({"head": {"said": ["saved 检查点", "no \ud800"]}}, {})
    assert carried[-1]["frames"]["head"]["said"] == ["saved 检查点", "no \ufffd"]
    view.refuse(1, "\udcff.tar")
    assert carried[-1]["refusal"] == "\ufffd.tar"


def test_no_data_is_a_synced_trait() -> None:
    view = View(["head"], "test")
    own = {name for name in view.keys if not name.startswith(("_", "layout", "tabbable", "tooltip"))}
    assert own == {"code", "still", "language"}


def test_a_notebook_holds_the_script_once_however_many_views_it_has() -> None:
    first, second = View(["head"], "one"), View(["charts"], "two")
    assert first.code == second.code == code().model_id
    assert len(json.dumps(first.get_state())) < 3_000


def test_the_script_carries_its_licence_and_asks_no_network() -> None:
    static = files("mmlab.ui") / "static"
    assert "MIT License" in (static / "uplot.LICENSE.txt").read_text()
    own = script().replace((static / "uplot.iife.min.js").read_text(), "") + style()
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", own)
    assert len(code().packed) < 120_000
    assert gzip.decompress(base64.b64decode(code().packed)).decode().startswith(script())
