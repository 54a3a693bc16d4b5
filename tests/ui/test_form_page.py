"""The form of a plan in a browser: typing, reasons, fixes, presets, files, copies, keyboard, several pages."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import Page

from mmlab.plan import Plan, known_keys
from mmlab.ui.form import Form
from ui.stage import Stage, browser_page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Shown:
    """A form on a stage, and what tests do with it."""

    def __init__(self, page: Page, form: Form, dark: bool = False) -> None:
        self.page, self.form = page, form
        self.stage = Stage(page, form, dark)
        self.until(lambda: page.locator(".mm-form-row").count() == len(known_keys()))

    def until(self, condition: Any) -> None:
        self.stage.until(condition)

    def entry(self, key: str) -> Any:
        return self.page.get_by_label(key, exact=True)

    def row(self, key: str) -> Any:
        return self.page.locator(".mm-form-row", has=self.page.locator(f'[data-key="{key}"]'))

    def side(self) -> str:
        return str(self.page.locator(".mm-form-side").inner_text())

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).first.click()


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browser_page() as page:
        yield page


@pytest.fixture
def shown(browser: Page) -> Iterator[Any]:
    opened: list[Shown] = []

    def show(form: Form, width: int = 1600, dark: bool = False) -> Shown:
        assert browser.context.browser
        page = browser.context.browser.new_page(viewport={"width": width, "height": 1000})
        opened.append(Shown(page, form, dark))
        return opened[-1]

    yield show
    for it in opened:
        it.form.close()
        it.page.close()


def laptop(lab: Any = None) -> Form:
    return Plan.preset("laptop").form(lab)


def test_typing_shows_reasons_and_a_click_fixes_them(shown: Any, tmp_path: Path) -> None:
    it = shown(laptop())
    it.until(lambda: it.page.locator(".mm-form-picture svg").count() == 2)
    assert "no problems" in it.page.locator(".mm-form-found").inner_text()
    it.entry("parallel.tp").fill("3")
    it.until(lambda: "do not split over tp 3" in it.row("parallel.tp").inner_text())
    assert it.entry("parallel.tp").get_attribute("aria-invalid") == "true"
    assert "7 ranks" in it.page.locator(".mm-form-status").inner_text()
    assert "4 heads" in it.page.locator(".mm-form-status .mm-form-sr").inner_text()
    it.until(lambda: "tp 3" in it.page.locator(".mm-form-picture").first.inner_html())
    it.stage.shot(tmp_path / "form.png")
    it.row("parallel.tp").get_by_role("button", name="Fix: parallel.tp from 3 to 2").first.click()
    it.until(lambda: "✓ no problems" in it.page.locator(".mm-form-status").inner_text())
    assert it.form.plan.parallel.tp == 2
    it.until(lambda: it.entry("parallel.tp").input_value() == "2")
    assert it.entry("parallel.tp").get_attribute("aria-invalid") == "false"
    assert it.stage.errors == []


def test_fix_all_shows_what_it_would_do_first(shown: Any) -> None:
    it = shown(laptop())
    it.entry("parallel.tp").fill("3")
    it.entry("data.global_batch").fill("7")
    it.until(lambda: "global_batch" in it.page.locator(".mm-form-problems").inner_text())
    before = it.form.plan
    it.press("Fix all…")
    apply = it.page.locator(".mm-form-problems .mm-form-preview button").first
    it.until(lambda: apply.count() and "Apply" in apply.inner_text())
    told = it.page.locator(".mm-form-problems .mm-form-preview").inner_text()
    assert "parallel.tp: 3 → " in told
    assert it.form.plan == before
    apply.click()
    it.until(lambda: not it.form.check())
    it.press("Undo")
    it.until(lambda: it.form.plan == before)


def test_text_that_is_no_value_stays_and_is_told_at_the_field(shown: Any) -> None:
    it = shown(laptop())
    it.entry("train.steps").fill("many")
    it.until(lambda: "'many' is not a whole number, at least 1" in it.row("train.steps").inner_text())
    assert "The plan keeps 150." in it.row("train.steps").inner_text()
    it.entry("parallel.tp").focus()
    it.page.wait_for_timeout(300)
    it.stage.pump()
    assert it.entry("train.steps").input_value() == "many"
    assert it.form.plan.train.steps == 150
    it.entry("train.steps").fill("12")
    it.until(lambda: it.form.plan.train.steps == 12 and "many" not in it.row("train.steps").inner_text())


def test_keyboard_alone_changes_undoes_and_redoes(shown: Any) -> None:
    it = shown(laptop())
    it.entry("parallel.tp").focus()
    it.page.keyboard.press("Control+a")
    it.page.keyboard.type("2")
    it.page.keyboard.press("Tab")
    it.until(lambda: it.form.plan.parallel.tp == 2)
    focused = "document.activeElement.className + document.activeElement.dataset.key"
    it.until(lambda: it.page.evaluate(focused))
    it.page.keyboard.press("Control+z")
    it.until(lambda: it.form.plan.parallel.tp == 1 and it.entry("parallel.tp").input_value() == "1")
    it.page.keyboard.press("Control+Shift+z")
    it.until(lambda: it.form.plan.parallel.tp == 2 and it.entry("parallel.tp").input_value() == "2")
    it.entry("train.vision.frozen").focus()
    it.page.keyboard.press("Space")
    it.until(lambda: it.form.plan.train.vision.frozen)
    it.entry("parallel.schedule").select_option("gpipe")
    it.until(lambda: it.form.plan.parallel.schedule == "gpipe")


def test_presets_files_and_search(shown: Any, tmp_path: Path) -> None:
    it = shown(laptop())
    path = tmp_path / "mine.toml"
    it.page.get_by_label("Start from").select_option("quickstart")
    it.until(lambda: it.form.plan == Plan.preset("quickstart"))
    it.entry("parallel.dp").fill("2")
    it.page.get_by_label("File", exact=True).fill(str(path))
    it.press("Save")
    it.until(lambda: "saved" in it.page.locator(".mm-said").inner_text())
    assert Plan.load(path) == it.form.plan == Plan.preset("quickstart").with_("parallel.dp=2")
    it.entry("parallel.dp").fill("1")
    it.press("Save")
    it.until(lambda: "is there already" in it.page.locator(".mm-said").inner_text())
    it.press("Keep it")
    assert Plan.load(path).parallel.dp == 2
    it.press("Save")
    it.until(lambda: it.page.get_by_role("button", name="Replace it").count())
    it.press("Replace it")
    it.until(lambda: Plan.load(path).parallel.dp == 1)
    path.write_text("[parallel]\ntpp = 1\n")
    it.press("Load")
    it.until(lambda: "unknown key parallel.tpp" in it.page.locator(".mm-said").inner_text())
    it.page.get_by_label("Search", exact=True).fill("powersgd columns")
    visible = it.page.locator(".mm-form-row:visible")
    it.until(lambda: visible.count() == 2)
    it.page.get_by_label("Search", exact=True).fill("")
    it.entry("parallel.dp").fill("4")
    it.until(lambda: it.form.plan.parallel.dp == 4)
    it.page.get_by_label("changed only").check()
    it.until(lambda: visible.count() == 1)
    it.press("Reset parallel.dp")
    it.until(lambda: it.form.plan.parallel.dp == 1)


def test_what_is_copied_says_the_plan(shown: Any) -> None:
    it = shown(laptop())
    it.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    it.entry("parallel.tp").fill("2")
    it.entry("name").fill("a name")
    words = it.page.locator(".mm-form-words")
    it.until(lambda: "a name" in words.inner_text())
    copied = {}
    for tab in ("Command line", "Python", "TOML"):
        it.press(tab)
        it.press("Copy")
        it.until(lambda: it.page.locator(".mm-form-card .mm-tools").first.inner_text().endswith(("copied", "Ctrl+C")))
        copied[tab] = str(it.page.evaluate("getSelection().toString()") or words.inner_text())
    it.page.get_by_label("How much of the TOML").select_option("comments")
    it.until(lambda: "# Data-parallel replicas" in words.inner_text())
    assert Plan.loads(words.text_content()) == it.form.plan
    assert Plan.loads(copied["TOML"]) == it.form.plan
    _, _, source, *changes = shlex.split(copied["Command line"])
    assert Plan.load(source).with_(*changes) == it.form.plan
    import mmlab

    assert eval(copied["Python"], {"mmlab": mmlab}) == it.form.plan


def test_two_pages_of_one_form_stay_in_step(shown: Any) -> None:
    first = shown(laptop())
    to_first = first.form.view.send
    second = shown(first.form)
    to_second = first.form.view.send

    def send_both(content: Any, buffers: Any = None) -> None:
        to_first(content, buffers)
        to_second(content, buffers)

    first.form.view.send = send_both
    first.entry("parallel.tp").fill("4")
    second.until(lambda: second.entry("parallel.tp").input_value() == "4")
    second.entry("train.steps").fill("soon")
    first.until(
        lambda: first.entry("train.steps").input_value() == "soon" and "soon" in first.row("train.steps").inner_text()
    )
    second.press("Undo")
    first.until(lambda: first.entry("train.steps").input_value() == "150")
    assert first.stage.errors == second.stage.errors == []


def test_train_says_which_run(shown: Any) -> None:
    trained: list[Plan] = []

    def train(plan: Plan) -> Any:
        trained.append(plan)
        return SimpleNamespace(id="laptop-0001", plan=plan)

    it = shown(laptop(SimpleNamespace(train=train)))
    it.entry("train.steps").fill("9")
    it.press("Train")
    it.until(lambda: "training as run laptop-0001" in it.page.locator(".mm-said").inner_text())
    assert [plan.train.steps for plan in trained] == [9]


@pytest.mark.parametrize(("width", "dark"), [(600, False), (600, True), (1600, True)])
def test_it_fits_the_page(shown: Any, width: int, dark: bool, tmp_path: Path) -> None:
    it = shown(laptop(), width, dark)
    it.entry("parallel.tp").fill("3")
    it.until(lambda: "do not split" in it.side() and it.page.locator(".mm-form-picture svg").count() == 2)
    assert it.page.evaluate("document.documentElement.scrollWidth") <= width
    it.stage.shot(tmp_path / f"form-{width}{'-dark' if dark else ''}.png")
