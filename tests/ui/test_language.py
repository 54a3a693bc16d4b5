"""What Python says, in Chinese: templates that stand in the source, with the same values; every field of the plan."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mmlab
from mmlab.plan import Plan
from mmlab.plan.idle import idle_fields
from mmlab.plan.keys import known_keys, sections
from mmlab.plan.memory import Memory
from mmlab.ui.dashboard import Dashboard
from mmlab.ui.language import Language, catalogue, language, spoken
from mmlab.ui.panels.form import fields
from mmlab.ui.words import event_text
from ui.synthetic import InboxRun, SyntheticRun

PACKAGE = Path(mmlab.__file__).parent
WHOLE = ("plan/idle.py", "plan/rules", "ui/words.py", "tracking/doctor.py", "tracking/bottleneck.py")
"""Modules all of whose sentences are translated."""
NOT_SAID = ("{0} min {1} s", "{0} h {1} min", "encoder on {0}", "{0}: {1} ranks, {2}; {3} samples a step in {4}",
            "mmlab does not run on native Windows; use WSL2 (`wsl --install`) and install it there")  # fmt: skip
"""Of those what only the command line says."""
JOINED = {
    "1 rank",
    "ranks {0}",
    "at least {0}",
    "above {0}",
    "at most {0}",
    "below {0}",
    "time in {0}",
    "{0} node",
    "{0} nodes",
    "; ",
    ": ",
    ", ",
    ". ",
    " and ",
    "  ",
}
"""Sentences that the source puts together of single words."""


def chinese() -> Language:
    found = language("zh-CN")
    assert found is not None
    return found


def folded(node: ast.AST, holes: list[ast.AST]) -> str:
    """A string of the source with {0} for its first value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(folded(value, holes) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return folded(node.left, holes) + folded(node.right, holes)
    holes.append(node.value if isinstance(node, ast.FormattedValue) else node)
    return f"{{{len(holes) - 1}}}"


def templates(node: ast.AST) -> Iterator[str]:
    """All strings of the source but docstrings, those within others too."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    added = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
    if isinstance(node, ast.JoinedStr) or added or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        holes: list[ast.AST] = []
        yield folded(node, holes)
        for hole in holes:
            yield from templates(hole)
        return
    for child in ast.iter_child_nodes(node):
        yield from templates(child)


def in_source(*parts: str) -> set[str]:
    """The strings of modules."""
    found: set[str] = set()
    for part in parts:
        path = PACKAGE / part
        for module in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found |= set(templates(ast.parse(module.read_text(encoding="utf-8"))))
    return found


def counted(text: str) -> set[str]:
    """ "{0} step{1}, then" as it is said of one and of several."""
    several = [re.sub(r"(?<=[a-z])\{\d\}(?= |,|$)", plural, text) for plural in ("", "s")]
    order = [list(dict.fromkeys(re.findall(r"\{(\d)\}", one))) for one in several]
    return {re.sub(r"\{(\d)\}", lambda hole, at=at: f"{{{at.index(hole[1])}}}", one)
            for one, at in zip(several, order, strict=True)}  # fmt: skip


def test_every_field_of_a_plan_is_explained_in_chinese() -> None:
    said = chinese()
    found = [(field["key"], field["help"], field["unit"], field["bounds"]) for field in fields()]
    found += [(name, help_, "", "") for name, help_ in sections().items()]
    assert len(found) == len(known_keys()) + len(sections()) > 150
    plain = [
        (key, text) for key, *texts in found for text in texts if text not in ("", "MB") and said.say(text) == text
    ]
    assert plain == []


def test_sentences_of_the_catalogue_stand_in_the_source() -> None:
    known = (
        {one for text in in_source(".") for one in (text, *counted(text))}
        | JOINED
        | {field[name] for field in fields() for name in ("help", "unit")}
    )
    known |= set(sections().values())
    assert sorted(set(catalogue("zh-CN", "said")) - known) == []


@pytest.mark.parametrize("part", WHOLE)
def test_all_sentences_of_these_modules_are_in_the_catalogue(part: str) -> None:
    known = {*catalogue("zh-CN"), *catalogue("zh-CN", "said"), *NOT_SAID}
    code = re.compile(r"[<>\\^]")
    prose = {text for text in in_source(part) if re.search(r"[a-z]{2,} \S*[a-z]{2}", text) and not code.search(text)}
    assert prose & known
    assert sorted(prose - known) == []


def test_translations_keep_the_values_of_their_sentences() -> None:
    for text, translated in catalogue("zh-CN", "said").items():
        assert translated.strip() or not text.strip(), text
        assert sorted(re.findall(r"\{\d\}", translated)) == sorted(re.findall(r"\{\d\}", text)), text


def test_what_was_wrong_and_what_fixes_it_is_said_in_chinese() -> None:
    said = chinese()
    changes = ("parallel.tp=3", "parallel.pp=7", "parallel.vision_dp=0", "model.vision.image_size=65", "name=a/b",
               "parallel.chunks=3", "train.optimizer=onebit_adam", "data.max_tiles=8", "cluster.shm_mb=1")  # fmt: skip
    texts = [text for change in changes for problem in Plan.preset("quickstart").with_(change).check()
             for text in (problem.message, problem.fix.sentence)]  # fmt: skip
    plan = Plan.preset("quickstart")
    texts += [*Memory(plan).notes, *idle_fields(plan).values()]
    assert len(texts) > 30
    assert [text for text in texts if not re.search(r"[\u4e00-\u9fff]|^ *\S+ = ", said.say(text))] == []
    (problem, *_) = plan.with_("parallel.tp=3").check()
    assert said.say(problem.message) == "4 个头（model.language.heads）不能按 tp 3 均分。"


def test_events_are_told_in_chinese_with_their_values() -> None:
    said = chinese()
    event = {"kind": "command", "verb": "step", "args": {"n": 3}, "ok": True, "step": 12, "ranks": [0, 1]}
    assert said.say(event_text(event | {"message": "3 steps, then a pause"})) == (
        "单步 3：第 12 步之后在 2 个 rank 上生效（3 步，然后暂停）"
    )
    saved = event_text(event | {"verb": "checkpoint", "args": {"name": "before"}, "message": "saved before"})
    assert said.say(saved) == "检查点 before：第 12 步之后在 2 个 rank 上生效（已保存 before）"  # its own name
    why = "rank 3 (stage 0 tp 1) failed in forward of step 12: ValueError: a fault of somebody"
    failed = said.say(event_text({"kind": "state", "state": "failed", "reason": why}))
    assert failed == "失败：rank 3（stage 0 tp 1）在第 12 步的前向中失败：ValueError: a fault of somebody"
    refused = {"kind": "command", "verb": "restore", "args": {"step": 40}, "step": 50, "message": "run x has no "
               "checkpoint 40; it has: a (step 1), b (step 2)"}  # fmt: skip
    assert (
        said.say(event_text(refused))
        == "恢复到第 40 步：被拒绝（运行 x 没有检查点 40；它有：a（第 1 步），b（第 2 步））"
    )


def test_of_long_lines_the_beginning_is_said_and_lists_of_any_length_are_taken() -> None:
    said = chinese()
    waiting = "; ".join(f"rank {rank} waits for rank {rank + 1}" for rank in range(100))
    failed = said.say(f"rank 3 (stage 0 tp 1) failed in forward of step 12: {waiting}\nits process ended")
    assert failed.startswith("rank 3（stage 0 tp 1）在第 12 步的前向中失败：rank 0 ")
    assert failed.endswith(waiting[240:] + "\n其进程已结束")
    names = ", ".join(f"name {number}" for number in range(400))
    assert said.say(names) == names
    has = ", ".join(f"c{step} (step {step})" for step in range(30))
    assert said.say(f"run x has no checkpoint 40; it has: {has}").count("（第") == 30


@pytest.mark.parametrize(
    "text", ["", "quickstart", "parallel.tp: 2 → 4", "a sentence that nobody has translated yet", "tree of life"]
)
def test_what_has_no_translation_stays_as_it_is(text: str) -> None:
    assert chinese().say(text) == text


def test_languages_are_found_by_their_codes() -> None:
    for code in ("zh", "zh-CN", "zh_Hans_CN"):
        assert isinstance(language(code), Language), code
    assert language("en") is language("de-DE") is language("") is None


def test_only_the_texts_that_a_panel_names_are_translated() -> None:
    frame = {"state": "paused", "reason": "its process ended", "rows": [{"text": "no events yet", "name": "paused"}]}
    assert spoken(frame, ("reason", "rows.*.text", "absent.*"), chinese()) == {
        "state": "paused",
        "reason": "其进程已结束",
        "rows": [{"text": "还没有事件", "name": "paused"}],
    }
    assert chinese().html("<p title='x'>its process ended &amp; </p><b>paused</b>") == (
        "<p title='x'>its process ended &amp; </p><b>已暂停</b>"
    )


def test_a_page_is_told_in_its_language_and_the_api_in_english(started: SyntheticRun) -> None:
    dashboard = Dashboard(InboxRun(started.dir), started.dir)
    sent: list[dict[str, object]] = []
    dashboard.view.send = lambda content, buffers=(): sent.append(content)  # type: ignore[method-assign, assignment]
    dashboard._heard(None, {"kind": "hello", "language": "zh-CN"}, [])
    deadline = time.monotonic() + 20
    while not any(message["kind"] == "history" for message in sent) and time.monotonic() < deadline:
        time.sleep(0.05)
    told = json.dumps(next(message for message in sent if message["kind"] == "history"), ensure_ascii=False)
    with dashboard._lock:
        sent.clear()
        dashboard._tell(OSError("gone"))
        dashboard.close()
    ticks = [message for message in sent if message["kind"] == "tick"]
    assert [set(frame) for frame in ticks[0]["frames"].values()] == [{"problem"}] * len(ticks[0]["frames"])
    assert "谱系" in told
    assert "lineage" not in told
    assert "lineage" in repr(dashboard)
