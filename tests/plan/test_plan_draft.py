"""A plan in the making: what is typed, undone, fixed, loaded and saved; and the same plan in other words."""

import shlex
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlab.errors import PlanError
from mmlab.plan import Plan, known_keys, preset_names
from mmlab.plan.draft import MOST_CHECKED, Draft
from mmlab.plan.entry import entry, parse, shown, unit
from mmlab.plan.idle import idle_fields
from mmlab.plan.keys import get
from mmlab.plan.memory import MOST_PLAYED, Memory
from mmlab.plan.spelled import Base, Spelled, differing_toml, nearest_preset

KEYS = known_keys()
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)


@pytest.fixture
def draft() -> Draft:
    return Draft(Plan.preset("laptop"))


def test_each_field_shows_its_value_as_text_that_stands_for_it() -> None:
    for plan in map(Plan.preset, preset_names()):
        for name, key in KEYS.items():
            value = get(plan, name)
            again = value if entry(key) == "choice" else parse(key, shown(value))
            assert plan.with_({name: again}) == plan


def test_units_are_those_of_the_docstrings() -> None:
    said = {
        "model.vision.image_size": "px", "model.language.vocab_size": "tokens", "parallel.tp": "ranks",
        "parallel.pp": "stages", "train.steps": "steps", "cluster.grace": "s", "data.cache_mb": "MB",
        "checkpoint.every_minutes": "min", "checkpoint.keep_every": "steps", "communication.vision.ratio": "share",
        "train.language.lr": "", "data.path": "",
    }  # fmt: skip
    assert {name: unit(KEYS[name]) for name in said} == said


def test_lists_are_read_from_what_people_type() -> None:
    draft = Draft(Plan())
    for key, text, value in (
        ("parallel.layers_per_stage", "1 2, 1", (1, 2, 1)),
        ("parallel.layers_per_stage", "", ()),
        ("data.weights", "0.5 2", (0.5, 2.0)),
        ("train.language.lora_targets", "q_proj, v_proj", ("q_proj", "v_proj")),
        ("data.sources", '["a-{0,1}.tar", "b"]', ("a-{0,1}.tar", "b")),
    ):
        assert draft.enter(key, text), draft.mistyped
        assert get(draft.plan, key) == value
        assert parse(KEYS[key], draft.text(key)) == list(value)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("parallel.tp", "many"), ("parallel.tp", "0"), ("parallel.tp", ""), ("parallel.tp", "1.5"),
        ("train.language.lr", "nan"), ("train.language.lr", "-1"), ("train.language.lr", "1e999"),
        ("parallel.schedule", "fastest"), ("parallel.layers_per_stage", "1, x"), ("data.weights", "[1,"),
        ("parallel.layers_per_stage", "0"),
    ],
)  # fmt: skip
def test_what_is_no_value_stays_in_the_field_and_out_of_the_plan(draft: Draft, key: str, text: str) -> None:
    before = draft.plan
    assert not draft.enter(key, text)
    assert draft.plan == before
    assert draft.text(key) == text
    assert KEYS[key].expects in draft.mistyped[key].reason
    with pytest.raises(PlanError, match=key):
        draft.save("never-written.toml")
    draft.undo()
    assert draft.mistyped == {}


def test_typing_into_one_field_is_undone_at_once_and_other_changes_one_by_one(draft: Draft) -> None:
    start = draft.plan
    for text in ("2", "25", "25x", "250"):
        draft.enter("train.steps", text, edit="a")
    draft.set("parallel.tp", 2)
    draft.set("parallel.dp", 2)
    assert draft.undoes == "parallel.dp: 1 → 2"
    draft.undo()
    draft.undo()
    assert draft.undoes == "train.steps: 150 → 250"
    assert draft.plan == start.with_("train.steps=250")
    draft.undo()
    assert (draft.plan, draft.undoes) == (start, "")
    with pytest.raises(PlanError, match="nothing to undo"):
        draft.undo()
    draft.redo()
    assert draft.plan.train.steps == 250
    draft.set("parallel.pp", 1)
    with pytest.raises(PlanError, match="nothing to do again"):
        draft.redo()


def test_fixes_apply_one_by_one_and_all_together(draft: Draft) -> None:
    draft.set("parallel.tp", 3)
    draft.set("data.global_batch", 7)
    problems = draft.problems()
    assert {problem.field for problem in problems} >= {"parallel.tp", "data.global_batch"}
    draft.fix(problems[0].fix)
    assert draft.plan.parallel.tp == 2
    draft.undo()
    told = draft.repaired()
    draft.repair()
    assert not draft.problems()
    assert {(change.key, change.after) for change in told} == {
        (change.key, get(draft.plan, change.key)) for change in told
    }
    draft.undo()
    assert draft.plan.parallel.tp == 3


def test_a_plan_of_very_many_ranks_says_that_it_was_not_checked(draft: Draft) -> None:
    draft.set("parallel.dp", MOST_CHECKED * 10**6)
    (problem,) = draft.problems()
    assert "not checked" in problem.message


def test_load_and_save_say_what_is_wrong_in_one_sentence(draft: Draft, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    draft.set("parallel.tp", 2)
    draft.save(path)
    assert (draft.base.kind, draft.base.name, list(draft.spelled.changes)) == ("file", str(path), [])
    with pytest.raises(PlanError, match="there already"):
        draft.save(path)
    draft.set("parallel.tp", 4)
    draft.save(path, overwrite=True)
    other = Draft(Plan())
    other.load(path)
    assert other.plan == draft.plan
    path.write_text("[parallel]\ntp = 0\n")
    missing = tmp_path / "missing.toml"
    for bad, said in (
        (path, "at least 1"),
        (missing, "No such file"),
        (tmp_path, "Is a directory"),
        ("", "give the path"),
    ):
        with pytest.raises(PlanError, match=said) as caught:
            other.load(bad)
        assert "\n" not in str(caught.value)
    assert other.plan == draft.plan
    with pytest.raises(PlanError, match="cannot write"):
        draft.save(tmp_path / "no" / "folder.toml")
    draft.start("quickstart")
    assert (draft.plan, draft.base.name) == (Plan.preset("quickstart"), "quickstart")


def values_of(name: str) -> st.SearchStrategy:
    """Values that a field admits."""
    key = KEYS[name]
    number = lambda kind, low: st.integers(low, 10**6) if kind == "whole" else st.floats(low, 1e6, exclude_min=True)  # noqa: E731
    if key.choices:
        return st.sampled_from(key.choices)
    if entry(key) in ("whole", "number"):
        return st.one_of(st.just(key.default), st.sampled_from((0, 1, 2, 0.5, 1e-7, 64)), number(entry(key), 0))
    if entry(key) == "list":
        names = st.lists(TEXTS, max_size=3)
        return names if "names" in key.expects else st.lists(st.integers(1, 9), max_size=3)
    return st.booleans() if entry(key) == "switch" else TEXTS


@st.composite
def changed_plans(draw: st.DrawFn) -> tuple[Base, Plan]:
    base = Base.preset(draw(st.sampled_from(preset_names())))
    plan = base.plan
    for name in draw(st.lists(st.sampled_from(list(KEYS)), max_size=8, unique=True)):
        try:
            plan = plan.with_({name: draw(values_of(name))})
        except PlanError:
            continue  # the strategy does not know all bounds
    return base, plan


@given(changed_plans())
@settings(max_examples=40)
def test_toml_python_and_command_line_give_the_same_plan(case: tuple[Base, Plan]) -> None:
    base, plan = case
    said = Spelled(plan, base)
    assert Plan.loads(said.toml) == plan
    assert Plan.loads(said.whole) == plan
    import mmlab

    assert eval(said.python, {"mmlab": mmlab}) == plan
    program, verb, source, *changes = shlex.split(said.command)
    assert (program, verb) == ("mmlab", "run")
    assert Plan.load(source).with_(*changes) == plan
    against = tomllib.loads(differing_toml(plan, base.plan))
    assert base.plan.with_(against) == plan


def test_the_words_are_those_that_a_person_would_write() -> None:
    plan = Plan.preset("laptop").with_("parallel.tp=2", 'train.language.lora_targets=["q_proj"]', "name=my run")
    said = Spelled(plan, Base.preset("laptop"))
    assert said.command == "mmlab run laptop 'name=my run' parallel.tp=2 'train.language.lora_targets=[\"q_proj\"]'"
    short = Spelled(Plan.preset("laptop").with_("parallel.tp=2"), Base.preset("laptop"))
    assert short.python == 'mmlab.Plan.preset("laptop").with_("parallel.tp=2")'
    assert short.command == "mmlab run laptop parallel.tp=2"
    assert nearest_preset(short.plan).name == "laptop"


def test_memory_groups_equal_ranks_and_adds_up() -> None:
    plan = Plan.preset("quickstart").with_("parallel.dp=2", "parallel.sharding=zero3")
    memory = Memory(plan)
    assert [row.what for row in memory.rows] == ["encoder", "stage 0", "stage 1"]
    assert sorted(rank for row in memory.rows for rank in row.ranks) == list(range(plan.world_size))
    plain = Memory(plan.with_("parallel.sharding=none"))
    for row, whole in zip(memory.rows[1:], plain.rows[1:], strict=True):
        assert row.parameters == whole.parameters
        assert row.weights == whole.weights / 2 == whole.parameters * 2
        assert sum(whole.state) == 16 * whole.parameters
    assert plain.largest.what == "stage 0"
    # 1F1B: the first of two stages holds two microbatches of the same blocks at once, GPipe all of them.
    many = [
        Memory(plan.with_("parallel.microbatches=4", f"parallel.schedule={name}")).rows for name in ("1f1b", "gpipe")
    ]
    assert many[1][1].activations == 2 * (many[0][1].activations or 0)
    assert Memory(plan.with_({"parallel.microbatches": MOST_PLAYED})).rows[1].activations is None
    assert "Not counted" in str(memory)
    assert memory._repr_html_().count("<tr") == 4


def test_fields_without_effect_are_named_with_their_condition() -> None:
    plan = Plan.preset("laptop")
    idle = idle_fields(plan)
    assert idle["communication.vision.rank"] == "with compressor powersgd"
    assert set(idle) <= set(KEYS)
    chosen = idle_fields(
        plan.with_("communication.vision.compressor=powersgd", "parallel.cp=2", "train.vision.frozen=true")
    )
    assert "communication.vision.rank" not in chosen
    assert "parallel.cp_mode" not in chosen
    assert "train.vision.lr" in chosen
