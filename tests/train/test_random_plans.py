"""Plans drawn at random: what the rules refuse they can mend, and what they admit equals one process."""

import random
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_files import PLANS

from mmlab.cluster.verify import verify
from mmlab.plan import Plan
from mmlab.plan.keys import get

MOST_RANKS = 8
BASE = {
    "data.global_batch": 8, "data.seq_len": 64, "train.vision.lr": 5e-4, "train.projector.lr": 2e-3,
    "train.language.lr": 2e-3, "train.language.weight_decay": 0.01,
}  # fmt: skip
SPACE = {
    "parallel.vision": ("own_ranks", "first_stage", "all_ranks"),
    "parallel.vision_dp": (0, 1, 2),
    "parallel.dp": (1, 1, 2),
    "parallel.tp": (1, 1, 2),
    "parallel.pp": (1, 2, 2, 4),
    "parallel.projector": ("vision", "first_stage"),
    "parallel.transfer": ("p2p", "all_gather"),
    "parallel.encoder_batch": (1, 1, 2),
    "parallel.encoder_ahead": (0, 0, 1, 2),
    "parallel.schedule": ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"),
    "parallel.cp": (1, 1, 2),
    "parallel.cp_mode": ("ring", "ulysses"),
    "parallel.cp_scope": ("all", "all", "image"),
    "parallel.sp": (False, True),
    "parallel.sharding": ("none", "none", "zero1", "zero2", "zero3"),
    "sharding.vision": ("whole", "whole", "layer", "module"),
    "sharding.reduce": ("step", "microbatch"),
    "parallel.microbatches": (1, 2, 4),
    "model.language.tied_embeddings": (True, False),
    "model.language.kv_heads": (4, 2),
    "model.language.attention_window": (0, 0, 7),
    "train.activation_checkpointing": (False, False, True),
    "precision.vision": ("fp32", "fp32", "bf16", "fp16"),
    "precision.projector": ("fp32", "fp32", "bf16", "fp16"),
    "precision.language": ("fp32", "fp32", "bf16", "fp16"),
    "train.vision.lora_rank": (0, 0, 0, 2),
    "train.projector.lora_rank": (0, 0, 0, 3),
    "train.language.lora_rank": (0, 0, 2),
    "train.vision.frozen": (False, False, True),
    "train.projector.frozen": (False, False, True),
    "train.language.frozen": (False, False, False, True),
}  # fmt: skip
"""Values that are drawn; a value that stands twice is drawn twice as often."""

drawn = st.fixed_dictionaries({key: st.sampled_from(values) for key, values in SPACE.items()})


def mended(plan):
    """The plan with the rules' own fixes applied, and how often that took; a fix may uncover another problem."""
    for rounds in range(12):
        problems = list(plan.check())
        if not problems:
            return plan, rounds
        overrides = problems[0].fix.overrides if problems[0].fix else ()
        assert overrides, f"{problems[0]} has no fix that can be applied"
        plan = plan.with_(*overrides)
    raise AssertionError(f"fixes go round in circles: {problems}")


def smaller(plan):
    """The plan with fewer replicas, stages or encoder ranks until it needs at most MOST_RANKS."""
    for key in ("parallel.dp", "parallel.pp", "parallel.tp", "parallel.cp", "parallel.vision_dp"):
        while plan.world_size > MOST_RANKS and _value(plan, key) > 1:
            plan = plan.with_({key: _value(plan, key) // 2})
    return plan


def _value(plan, key):
    return getattr(plan.parallel, key.removeprefix("parallel."))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(drawn)
def test_fixes_of_the_rules_lead_to_a_plan_that_they_admit(values):
    plan, _ = mended(Plan().with_(BASE | values))
    plan.schedule().simulate()


def pairs(plan):
    """Every two settings of SPACE that a plan has together, number formats aside (they have plans of their own)."""
    return set(combinations([(key, get(plan, key)) for key in SPACE if not key.startswith("precision.")], 2))


def test_the_plans_have_every_pair_of_settings_that_the_rules_admit():
    random_ = random.Random(0)
    admitted = set()
    for _ in range(400):
        values = {key: random_.choice(choices) for key, choices in SPACE.items()}
        plan = smaller(mended(smaller(Plan().with_(BASE | values)))[0])
        if plan.world_size <= MOST_RANKS and not list(plan.check()):
            admitted |= pairs(plan)
    covered = set().union(*(pairs(Plan.load(str(path))) for path in PLANS))
    assert len(admitted) > 1000
    assert admitted - covered == set()


def check_drawn(pool, shards, values):
    plan, _ = mended(smaller(Plan().with_(BASE | values)))
    plan = smaller(plan)
    result = verify(plan.with_({"data.path": str(shards), "data.held_out": ""}), steps=2, pool=pool)
    assert result["ok"], (result["worst"], result["own_precision"], plan.dumps())


SLOW = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(values=drawn)
def test_a_drawn_plan_equals_one_process(pool, shards, values):
    check_drawn(pool, shards, values)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(values=drawn)
def test_many_drawn_plans_equal_one_process(pool, shards, values):
    check_drawn(pool, shards, values)
