"""The project keeps what it says: sizes, light imports, and documents that agree with the code."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

import mmlab
from mmlab.cli import build_app
from mmlab.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "README.zh-CN.md")
SIZES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mmlab"]["sizes"]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def too_long():
    """Every file and function that is longer than the project allows."""
    found = set()
    for folder in ("mmlab", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
            if len(text.splitlines()) > SIZES["file_lines"]:
                found.add(name)
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or node.lineno) - node.lineno + 1
                    if lines > SIZES["function_lines"]:
                        found.add(f"{name}:{node.name}")
    return found


def test_files_and_functions_are_short_or_listed_with_a_reason():
    assert too_long() == set(SIZES["exceptions"])
    assert all(reason.strip() for reason in SIZES["exceptions"].values())


def test_what_a_kernel_imports_needs_no_torch():
    faces = (
        "mmlab.plan, mmlab.messages, mmlab.tracking.record, mmlab.lab, mmlab.cli, mmlab.ui.dashboard, mmlab.ui.report, "
        "mmlab.server.app"
    )
    program = f"import sys, mmlab, {faces}\nprint(*(n for n in ('torch', 'ipyparallel') if n in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == []


def test_importing_the_package_loads_next_to_nothing():
    program = "import sys; before = set(sys.modules); import mmlab; print(*set(sys.modules) - before)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    loaded = {name.split(".")[0] for name in ended.stdout.split()} - sys.stdlib_module_names
    assert loaded == {"mmlab"}


@pytest.mark.parametrize("name", mmlab.__all__)
def test_public_names_exist_and_are_documented(name):
    assert (getattr(mmlab, name).__doc__ or "").strip()


def blocks(name, language="bash"):
    """The code blocks of a document."""
    return re.findall(rf"```{language}\n(.*?)```", read(name), re.DOTALL)


def test_ci_runs_the_lines_of_the_readme():
    (line,) = [block.strip() for block in blocks("README.md") if ".[test]" in block]
    install, _, test = line.rpartition(" && ")
    steps = read(".ci/run").splitlines()
    assert install in steps
    assert test in steps
    shared, alone = f'shared=({test} -m "slow and not alone" --share .venv/taken)', f'{test} -m "slow and alone"'
    assert steps.index(install) < steps.index(test) < steps.index(shared) < steps.index(alone)


def without_comments(code):
    return [line.split("#")[0].rstrip() for line in code.splitlines()]


def test_both_readmes_show_the_same_code():
    english, chinese = (blocks(name) + blocks(name, "python") for name in READMES)
    assert [without_comments(block) for block in english] == [without_comments(block) for block in chinese]
    numbers = [set(re.findall(r"\d\.\de-\d+", read(name))) for name in READMES]
    assert numbers[0] == numbers[1]


def commands(app, prefix=""):
    """The names of an application's commands, those of a group as "group command"."""
    names = {prefix + (command.name or command.callback.__name__) for command in app.registered_commands}
    for group in app.registered_groups:
        names |= commands(group.typer_instance, f"{group.name} ")
    return names


@pytest.mark.parametrize("name", READMES)
def test_the_table_of_commands_is_that_of_the_command_line(name):
    rows = re.findall(r"^\| (`mmlab .*?) \|", read(name), re.MULTILINE)
    shown = set()
    for usage in (usage for row in rows for usage in re.findall(r"`mmlab ([^`]*)`", row)):
        words = usage.replace("\\|", "|").split()
        grouped = words[0] in ("data", "bench")
        shown |= {f"{words[0]} {words[1]}"} if grouped else set(words[0].split("|"))
    assert shown == commands(build_app())


def sections(model, prefix=""):
    """Plan sections with fields of their own, as they stand in TOML."""
    found = set()
    for key, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            below = sections(kind, f"{prefix}{key}.")
            plain = len(kind.model_fields) > len([b for b in below if b.count(".") == prefix.count(".") + 1])
            found |= below | ({f"{prefix}{key}"} if plain else set())
    return found


@pytest.mark.parametrize("name", READMES)
def test_the_table_of_sections_is_that_of_the_plan(name):
    rows = [line for line in read(name).splitlines() if line.startswith("| `[")]
    assert set(re.findall(r"`\[([a-z.]+)\]`", "\n".join(rows))) == sections(Plan)


@pytest.mark.parametrize("name", [*READMES, "DECISIONS.md"])
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#]+)\)", read(name)):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_decisions_are_newest_first_and_three_lines_each():
    entries = re.split(r"^## ", read("DECISIONS.md"), flags=re.MULTILINE)[1:]
    assert [int(entry.split(".")[0]) for entry in entries] == list(range(len(entries), 0, -1))
    for entry in entries:
        heading, *lines = entry.strip().splitlines()
        assert [line.split(":")[0] for line in lines] == ["What", "Why", "Instead"], heading
