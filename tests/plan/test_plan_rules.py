import io
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import plans
from rich.console import Console

from mmlab.errors import LabError, PlanError
from mmlab.plan import Fix, Plan, Problem, Problems, check_platform
from mmlab.plan.rules import RULES
from mmlab.plan.rules.common import divisor

BROKEN = sorted((Path(__file__).parent.parent / "plans" / "broken").glob("*.toml"))


def stated(path: Path) -> tuple[str, bool]:
    """The field that the first line of a broken plan says is at fault, and whether there is a fix."""
    first = path.read_text().splitlines()[0]
    return first.removeprefix("# ").partition(":")[0], "(no fix)" not in first


def load(path: Path) -> Plan | None:
    try:
        return Plan.load(path)
    except PlanError:
        return None


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_broken_plans_name_the_field_and_are_repaired(path):
    field, fixable = stated(path)
    plan = load(path)
    if plan is None:
        with pytest.raises(PlanError) as caught:
            Plan.load(path)
        assert field in str(caught.value)
        assert path.name in str(caught.value)
        assert not fixable
        return
    problems = plan.check()
    assert field in [problem.field for problem in problems]
    with pytest.raises(PlanError) as caught:
        problems.raise_if_any()
    assert field in str(caught.value)
    if not fixable:
        with pytest.raises(PlanError, match=field):
            problems.apply()
        return
    repaired = problems.apply()
    assert list(repaired.check()) == []
    assert repaired != plan
    repaired.layout()
    repaired.schedule().simulate()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_rule_is_broken_by_some_plan(rule):
    assert rule.__doc__
    assert any(list(rule(plan)) for path in BROKEN if (plan := load(path)) is not None)


@given(plans())
def test_a_sound_plan_has_no_problems(plan):
    problems = [p.field for p in plan.check()]
    t = plan.train
    frozen = t.vision.frozen and t.projector.frozen and t.language.frozen
    expected = ["parallel.vision_dp"] if plan.parallel.vision_dp > plan.data.global_batch else []
    assert problems == expected + (["train.projector.frozen"] if frozen else [])


@given(
    st.fixed_dictionaries(
        {
            "parallel.tp": st.integers(1, 9),
            "parallel.pp": st.integers(1, 9),
            "parallel.dp": st.integers(1, 9),
            "parallel.cp": st.integers(1, 3),
            "parallel.vision": st.sampled_from(("own_ranks", "first_stage", "all_ranks")),
            "parallel.vision_dp": st.integers(0, 20),
            "parallel.encoder_batch": st.integers(1, 9),
            "parallel.encoder_ahead": st.integers(0, 2),
            "parallel.microbatches": st.integers(1, 9),
            "parallel.schedule": st.sampled_from(("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")),
            "parallel.chunks": st.integers(0, 4),
            "parallel.layers_per_stage": st.lists(st.integers(1, 4), max_size=6),
            "data.global_batch": st.integers(1, 64),
            "data.seq_len": st.integers(2, 3000),
            "model.vision.image_size": st.integers(1, 200),
            "model.vision.heads": st.integers(1, 9),
            "model.language.hidden": st.integers(1, 300),
            "model.language.heads": st.integers(1, 9),
            "model.language.kv_heads": st.integers(1, 9),
            "model.language.vocab_size": st.integers(8, 2000),
            "model.language.max_positions": st.integers(1, 3000),
            "cluster.ranks_per_node": st.sampled_from((0, 2, 3, 4, 8)),
        }
    )
)
def test_fixes_repair_any_combination_of_faults(values):
    repaired = Plan().with_(values).check().apply()
    assert list(repaired.check()) == []


@given(plans(), st.integers(2, 60))
def test_too_few_engines_are_a_problem_with_a_fix(plan, engines):
    problems = [p for p in plan.check(engines=engines) if "engine" in p.message]
    assert len(problems) == (plan.world_size > engines)
    for problem in problems:
        smaller = plan.with_(problem.fix)
        assert smaller.world_size <= engines
        assert problem.field in [change.key for change in plan.diff(smaller)]
        assert problem.fix.overrides == tuple(f"{c.key}={c.after}" for c in _in_order(plan.diff(smaller), problem.fix))


def _in_order(diff, fix):
    order = [override.partition("=")[0] for override in fix.overrides]
    return sorted(diff, key=lambda change: order.index(change.key))


def test_one_engine_is_too_few_for_an_encoder_of_its_own():
    (problem,) = Plan.preset("quickstart").check(engines=1)
    assert problem.field == "parallel"
    assert "at least 2" in str(problem.fix)
    assert problem.fix.overrides == ()


def test_engines_count_in_repairs():
    repaired = Plan.preset("quickstart").check(engines=3).apply()
    assert repaired.world_size == 3
    assert repaired.parallel.pp == 2


def test_fixes_are_overrides():
    plan = Plan().with_("parallel.pp=6")
    (problem,) = plan.check()
    assert plan.with_(problem.fix) == plan.with_(*problem.fix) == plan.with_("parallel.pp=4")


def test_problems_show_in_text_rich_and_html():
    problem = Problem("parallel.tp", "too <many> [ranks]", Fix("use fewer", ("parallel.tp=1",)))
    problems = Problems(Plan(), [problem])
    out = io.StringIO()
    Console(file=out, width=60).print(problems)
    assert "<many>" not in problems._repr_html_()
    for text in (str(problems), out.getvalue(), problems._repr_html_()):
        assert all(part in text for part in ("field", "parallel.tp", "use fewer", "[ranks]"))
    assert str(Problems(Plan())) == "no problems"
    assert pickle.loads(pickle.dumps(problems)) == problems
    Problems(Plan()).raise_if_any()


def test_windows_is_refused_in_one_sentence():
    with pytest.raises(LabError, match="WSL2") as caught:
        check_platform("win32")
    assert str(caught.value).count(". ") == 0
    check_platform("linux")
    check_platform("darwin")


def test_divisor():
    assert divisor(4, 6, 9) == 3
    assert divisor(0, 7) == 1


def test_fewer_engines_give_up_sequence_parallelism_with_the_tensor_group():
    plan = Plan.preset("laptop").with_("parallel.pp=1", "parallel.tp=2", "parallel.cp=2", "parallel.sp=true")
    assert plan.check(engines=3).apply().parallel.tp == 2
    repaired = plan.check(engines=2).apply()
    assert (repaired.parallel.tp, repaired.parallel.cp, repaired.parallel.sp) == (1, 1, False)
    assert list(repaired.check(engines=2)) == []
