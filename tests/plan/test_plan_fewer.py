"""Layouts on fewer ranks, for runs that have lost some."""

import pytest

from mmlab.plan import Plan
from mmlab.plan.fewer import fewer


def plan(*changes):
    return Plan.preset("quickstart").with_(*changes)


@pytest.mark.parametrize(
    ("changes", "ranks", "expected"),
    [
        (("parallel.dp=4", "parallel.tp=1", "parallel.pp=1", "parallel.microbatches=1"), 5, (4, 1, 1)),
        (("parallel.dp=4", "parallel.tp=1", "parallel.pp=1", "parallel.microbatches=1"), 3, (2, 1, 2)),
        (("parallel.dp=4", "parallel.tp=1", "parallel.pp=1", "parallel.microbatches=2"), 2, (1, 1, 8)),
        (("parallel.dp=2", "parallel.microbatches=2"), 9, (2, 1, 2)),
        (("parallel.dp=2", "parallel.microbatches=2"), 8, (1, 2, 4)),
        (("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.dp=2", "parallel.tp=2"), 7, (1, 0, 4)),
    ],
)
def test_the_largest_layout_that_is_admitted(changes, ranks, expected):
    full = plan(*changes)
    found = fewer(full, ranks)
    p = found.parallel
    assert (p.dp, p.vision_dp, p.microbatches) == expected
    assert found.world_size <= ranks
    assert list(found.check()) == []
    assert found.data.global_batch == full.data.global_batch
    assert found.microbatch_size <= full.microbatch_size
    assert {change.key for change in full.diff(found)} <= {
        "parallel.dp",
        "parallel.vision_dp",
        "parallel.microbatches",
    }


def test_tensor_and_pipeline_ranks_cannot_be_done_without():
    assert fewer(plan(), 4) is None
    assert fewer(plan("parallel.vision_dp=1"), 4) is None
    assert fewer(plan(), 5).parallel.vision_dp == 1
