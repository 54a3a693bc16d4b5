"""Which compressor has which options, and what a choice of one is refused for."""

from pathlib import Path

import pytest

from mmlab.errors import PlanError
from mmlab.plan import Plan, live_keys
from mmlab.plan.compression import COMPRESSORS, GROUPS, OPTIONS, SHARED, checked, live_values
from mmlab.plan.schema import GroupCommunication


def test_every_compressor_and_every_live_field_of_a_group_is_known():
    assert tuple(OPTIONS) == COMPRESSORS
    fields = {name for options in OPTIONS.values() for name in options} | set(SHARED) | {"compressor"}
    assert fields == GroupCommunication.model_fields.keys() - {"bucket_mb"}
    assert {f"communication.{group}.{name}" for group in GROUPS for name in fields} <= set(live_keys())


def test_a_choice_is_a_set_of_live_keys():
    assert live_values("language", "powersgd", {"rank": 4, "residual": "drop"}) == {
        "communication.language.compressor": "powersgd",
        "communication.language.rank": 4,
        "communication.language.residual": "drop",
    }
    both = live_values("all", "none", {})
    assert both == {"communication.vision.compressor": "none", "communication.language.compressor": "none"}


@pytest.mark.parametrize(
    ("group", "compressor", "options", "says"),
    [
        ("text", "topk", {}, "'text' is not a group whose gradients are compressed: vision, language or all"),
        ("projector", "topk", {}, "the projector goes with the side that computes it"),
        ("all", "powerSGD", {}, "unknown compressor 'powerSGD'; the nearest known one is powersgd"),
        ("all", "1bit", {}, "the nearest known one is onebit"),
        ("all", 3, {}, "unknown compressor 3"),
        ("vision", "topk", {"rank": 4}, "topk has no option rank; it has ratio, error_feedback, residual"),
        ("vision", "bf16", {"error_feedback": True}, "bf16 has no option error_feedback; it has residual"),
        ("vision", "topk", {"bucket_mb": 1.0}, "topk has no option bucket_mb"),
    ],
)
def test_what_does_not_exist_is_refused_in_one_sentence(group, compressor, options, says):
    with pytest.raises(PlanError) as error:
        live_values(group, compressor, options)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_plan_may_say_what_a_run_can_be_told():
    for compressor, options in OPTIONS.items():
        defaults = GroupCommunication()
        values = live_values("all", compressor, {name: getattr(defaults, name) for name in (*options, *SHARED)})
        assert Plan.preset("laptop").with_(values).communication.vision.compressor == compressor


def test_a_live_change_that_a_rule_refuses_is_refused():
    plan = Plan.load(Path(__file__).parent.parent / "plans" / "deepspeed-zero1.toml")
    with pytest.raises(PlanError, match="DeepSpeed reduces gradients itself"):
        checked(plan, live_values("language", "topk", {}))
    wrong = plan.with_("communication.vision.compressor=topk")  # what was wrong before does not count
    changed = checked(wrong, {"communication.language.ratio": 0.1})
    assert changed.communication.language.ratio == 0.1
