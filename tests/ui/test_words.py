"""The words of pages: every text that a person reads is in the catalogue, and nothing else is."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from mmlab.messages import PHASES
from mmlab.messages.control import VERBS
from mmlab.plan import Plan
from mmlab.plan.bubbles import ideal_bubble
from mmlab.tracking.traffic import PURPOSE
from mmlab.ui.dashboard import PARTS, Dashboard
from mmlab.ui.feed import BETWEEN
from mmlab.ui.lanes import kinds
from mmlab.ui.language import catalogue
from mmlab.ui.view import View, script
from ui.synthetic import InboxRun, SyntheticRun

STATIC = files("mmlab.ui") / "static"
STATES = ("queued", "starting", "running", "paused", "finished", "failed", "stopped", "deleted", "ready", "ended")
"""Of runs and labs."""
MODULES = ("vision", "projector", "language")
LITERAL = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|`(?:[^`\\$]|\\.)*`"
CALL = re.compile(rf"(?<![\w.$])t\(\s*({LITERAL})\s*[,)]")
TITLE = re.compile(rf"static title = ({LITERAL});")
TABLES = {
    "charts.js": {"CHARTS": r'\["([^"]*)", \[|\], "([^"]*)"\]', "CURVE_WORDS": r': "([^"]*)"'},
    "charts_plot.js": {"MARKS": r'"([^"]*)"\]'},
    "checkpoints.js": {"CK_COLUMNS": r'\["([^"]*)",'},
    "compression.js": {"OPTION_NAMES": r': "([^"]*)"'},
    "placement.js": {"RANK_STATES": r"(\w+): "},
    "schedule.js": {"MESSAGES": r': "([^"]*)"'},
}
"""Constants of scripts whose texts are translated where they are used, and where in them the texts stand."""


def sources() -> dict[str, str]:
    """The page's own scripts by name."""
    names = [STATIC / "base.js", STATIC / "app.js", *(STATIC / "panels").iterdir()]
    return {path.name: path.read_text(encoding="utf-8") for path in names if path.name.endswith(".js")}


def unquoted(literal: str) -> str:
    return re.sub(r"\\(.)", r"\1", literal[1:-1])


def tabled() -> set[str]:
    """Texts in the constants of TABLES."""
    found: set[str] = set()
    for name, tables in TABLES.items():
        for constant, text in tables.items():
            (body,) = re.findall(rf"^const {constant} = (.*?[\]}}]);", sources()[name], re.DOTALL | re.MULTILINE)
            texts = {
                one for groups in re.findall(text, body) for one in ([groups] if isinstance(groups, str) else groups)
            }
            assert texts, constant
            found |= texts - {""}
    return found


def written() -> set[str]:
    """Texts that stand in scripts, in t("...") or as a panel's title."""
    found = [literal for text in sources().values() for literal in (*CALL.findall(text), *TITLE.findall(text))]
    return {unquoted(literal) for literal in found} - {""} | tabled()


def handed_over(run: SyntheticRun) -> set[str]:
    """Words that pages get from Python and translate: labels, states, phases, modules, commands, ops of schedules."""
    board = Dashboard(InboxRun(run.dir), run.dir)
    labels = {label for label, _ in PARTS.values()} | {board.view.layout_["label"]}
    board.close()  # its thread would send into a later test's count of messages
    for path in files("mmlab.ui").iterdir():
        if path.name.endswith(".py"):
            labels |= set(re.findall(r'Part\([^\n]*, "([A-Z][^"]*)"\)', path.read_text(encoding="utf-8")))
    assert "Engines and runs of a lab" in labels
    form = Plan.preset("laptop").form()
    labels.add(form.view.layout_["label"])
    form.close()
    ops = {word for kind, name, *_ in kinds() for word in (kind.replace("_", " "), name)}
    schedules = [Plan.preset("quickstart").with_(f"parallel.schedule={name}") for name in ("1f1b", "zb_h1")]
    given = {ideal.given for plan in schedules if (ideal := ideal_bubble(plan)) is not None}
    return labels | ops | given | {*PURPOSE.values()} | {*STATES, *BETWEEN.values(), *PHASES, *MODULES, *VERBS}


def test_the_catalogue_has_exactly_the_words_of_the_pages(started: SyntheticRun) -> None:
    known, wanted = set(catalogue("zh-CN")), written() | handed_over(started)
    assert sorted(known - wanted) == []
    assert sorted(wanted - known) == []


def test_texts_are_literals_so_that_the_catalogue_can_hold_them() -> None:
    for name, text in sources().items():
        assert not re.search(r"(?<![\w.$])t\(\s*`[^`]*\$\{", text), name


def test_translations_keep_the_places_of_values() -> None:
    for text, translated in catalogue("zh-CN").items():
        assert translated.strip(), text
        assert sorted(re.findall(r"\{\d\}", translated)) == sorted(re.findall(r"\{\d\}", text)), text


@pytest.mark.parametrize("name", sorted(sources()))
def test_no_text_of_a_page_passes_the_catalogue_by(name: str) -> None:
    """A text with a blank in it that is handed to the page without t() would stay English."""
    text = re.sub(r"/\*.*?\*/|(?<!:)//.*", "", sources()[name], flags=re.DOTALL)
    bare = re.findall(r"(?:title|placeholder|\"aria-label\"): \"[^\"]*\"|\}, \"[A-Za-z][^\"]* [^\"]*\"\)", text)
    assert bare == []


def test_the_language_is_the_pages_unless_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMLAB_LANGUAGE", raising=False)
    assert View(["head"], "test").language == ""
    monkeypatch.setenv("MMLAB_LANGUAGE", "zh-CN")
    assert View(["head"], "test").language == "zh-CN"


def test_the_script_carries_the_catalogue() -> None:
    assert json.dumps(catalogue("zh-CN"), ensure_ascii=False, separators=(",", ":")) in script()


def test_the_sidebar_is_in_chinese_where_jupyterlab_looks_for_it() -> None:
    """JupyterLab merges `locale/` beside the module that the entry point names, under the entry point's name."""
    root = Path(__file__).resolve().parents[2]
    entry = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]["jupyterlab.locale"]
    place = Path(str(files(entry["mmlab"]))) / "locale" / "zh_CN" / "LC_MESSAGES" / "mmlab.json"
    found = json.loads(place.read_text(encoding="utf-8"))
    head = found.pop("")
    assert (head["domain"], head["language"]) == ("mmlab", "zh-CN")  # as the page calls it
    source = "".join(path.read_text(encoding="utf-8") for path in sorted((root / "extensions" / "src").glob("*.ts")))
    wanted = {unquoted(literal) for literal in re.findall(rf"(?<=__\()\s*({LITERAL})", source)}
    wanted |= {f"{context}\u0004{text}" for context, text in re.findall(r"_p\('(\w+)', '([^']+)'\)", source)}
    assert not re.search(r"__\(\s*[^'\"`\s]", source), "a text that is no literal"
    assert sorted(wanted - set(found)) == []
    assert sorted(set(found) - wanted) == []
    for text, (translated,) in found.items():
        assert translated.strip(), text
        assert sorted(re.findall(r"%\d", translated)) == sorted(re.findall(r"%\d", text)), text
