"""`docs/questions.md`: what it tells people to run exists, and both languages say the same."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from typer.main import get_command

from mmlab.cli import build_app
from mmlab.plan import Plan

DOCS = Path(__file__).resolve().parent.parent / "docs"
NAMES = ("questions.md", "questions.zh-CN.md")
REFUSED = {"check llava-7b parallel.tp=16"}
"""Commands that show how a plan is refused."""


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def commands(name: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", read(name), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert all(line.startswith("mmlab ") for line in lines)
    return [line.removeprefix("mmlab ") for line in lines]


@pytest.fixture(scope="module")
def app() -> click.Command:
    return get_command(build_app())


def parsed(command: click.Command, line: str) -> click.Context:
    """A command as the command line takes it; fails on what it does not know."""
    words = line.split()
    context = click.Context(command)
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        assert found is not None, line
        command, context = found, click.Context(found, parent=context)
        words = words[1:]
    return command.make_context(command.name, words)


@pytest.mark.parametrize("line", commands("questions.md"))
def test_commands_and_plans_are_real(app: click.Command, line: str) -> None:
    context = parsed(app, line)
    plan = context.params.get("plan")
    if plan is None or plan == "last":
        return
    changes = [word for word in line.split() if "=" in word and not word.startswith("-")]
    problems = Plan.load(plan).with_(*changes).check()
    assert bool(problems) == (line in REFUSED), str(problems)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", read(name))
    assert len(targets) > 4
    assert [target for target in targets if not (DOCS / target).exists()] == []


def test_every_question_has_its_three_parts_in_both_languages() -> None:
    english, chinese = (re.split(r"^## ", read(name), flags=re.MULTILINE)[1:] for name in NAMES)
    assert len(english) == len(chinese) == 16
    for number, (one, other) in enumerate(zip(english, chinese, strict=True), 1):
        assert one.startswith(f"{number}. ")
        assert other.startswith(f"{number}. ")
        assert "**Where common advice errs.**" in one
        assert "**常见说法错在哪里。**" in other
        assert "```bash" in one
        assert re.findall(r"\]\(([^)]+)\)", one) == re.findall(r"\]\(([^)]+)\)", other)


def test_both_languages_show_the_same_commands_and_figures() -> None:
    assert commands(NAMES[0]) == commands(NAMES[1])
    figures = [set(re.findall(r"\d+\.\d+|\d{1,3}(?:,\d{3})+", read(name))) for name in NAMES]
    assert figures[0] == figures[1]
