"""Traced steps: found while files grow, and played again as measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmlab.errors import MmlabError
from mmlab.plan import Plan
from mmlab.plan.simulate import estimated_costs
from mmlab.tracking.record import RunRecord
from mmlab.tracking.traced import MeasuredSchedule, Traces


def line(step: int, *ops: list[object]) -> str:
    return json.dumps({"step": step, "t0": 1.0, "ops": list(ops)}, separators=(",", ":")) + "\n"


def write(folder: Path, rank: int, text: str, mode: str = "a") -> None:
    with open(folder / f"rank-{rank}.jsonl", mode) as file:
        file.write(text)


def test_only_steps_of_all_ranks_count_and_only_whole_lines(tmp_path: Path) -> None:
    traces = Traces(tmp_path)
    assert traces.steps(2) == []
    write(tmp_path, 0, line(2) + line(12))
    write(tmp_path, 1, line(2))
    assert traces.steps(2) == [2]
    write(tmp_path, 1, line(12)[:-5])
    assert traces.steps(2) == [2]
    write(tmp_path, 1, line(12)[-5:])
    assert traces.steps(2) == [2, 12]
    assert traces.load(12, 2)[1]["step"] == 12


def test_a_step_done_again_after_a_restore_is_the_newest(tmp_path: Path) -> None:
    traces = Traces(tmp_path)
    for rank in range(2):
        write(tmp_path, rank, line(2) + line(12))
    assert traces.steps(2)[-1] == 12
    for rank in range(2):
        write(tmp_path, rank, line(2, ["forward", 0, 0.0, float(rank), 0]))
    assert traces.steps(2) == [12, 2]
    assert traces.load(2, 2)[1]["ops"][0][3] == 1.0


def test_a_file_begun_anew_and_ranks_that_are_no_more(tmp_path: Path) -> None:
    traces = Traces(tmp_path)
    for rank in range(3):
        write(tmp_path, rank, line(2) + line(12) + line(22))
    assert traces.steps(3) == [2, 12, 22]
    for rank in range(2):
        write(tmp_path, rank, line(32), "w")
    assert traces.steps(2) == [32]
    assert traces.steps(3) == []


def test_replaying_measured_means_gives_the_step_when_times_are_alike() -> None:
    plan = Plan.preset("quickstart")
    costs = {
        key: 0.01 * cost * (1 if key[1] in ("reduce", "reduce_embedding", "norm") else 1 + 0.1 * key[0])
        for key, cost in estimated_costs(plan).items()
    }
    timeline = plan.schedule().simulate(costs)
    records = {
        rank: {"step": 7, "t0": 5.0, "ops": [[t.op.kind, t.op.microbatch, t.start, t.end, t.op.chunk] for t in ops]}
        for rank, ops in enumerate(timeline)
    }
    found = MeasuredSchedule(plan, records)
    for again, before in zip(found.planned(), timeline, strict=True):
        assert [t.op.kind for t in again] == [t.op.kind for t in before]
        assert [t.end for t in again] == pytest.approx([t.end for t in before])
    assert found.bubble() == pytest.approx(plan.schedule().bubble(costs))
    assert found.seconds == pytest.approx(max(t.end for ops in timeline for t in ops))
    assert "step 7, as measured" in str(found)
    assert found._repr_mimebundle_()["text/html"].startswith("<svg")
    with pytest.raises(MmlabError, match="1 of 6 ranks"):
        MeasuredSchedule(plan, {0: records[0]})


def test_waiting_within_a_reduction_is_not_taken_for_its_cost() -> None:
    plan = Plan.preset("laptop")
    costs = estimated_costs(plan) | {(1, "forward", 0): 5.0}
    records = {}
    for rank, ops in enumerate(plan.schedule().simulate(costs)):
        before, told = 0.0, []
        for op, start, end in ops:  # as ranks measure it: a reduction begins when the rank enters it
            told.append([op.kind, op.microbatch, before if op.kind == "norm" else start, end, op.chunk])
            before = end
        records[rank] = {"step": 3, "t0": 0.0, "ops": told}
    found = MeasuredSchedule(plan, records)
    assert found.costs[2, "norm", 0] == pytest.approx(costs[2, "norm", 0])
    assert [ops[-1].end for ops in found.planned()] == pytest.approx([ops[-1].end for ops in found.timeline])


def test_a_run_without_traces_says_so(tmp_path: Path) -> None:
    from ui.synthetic import SyntheticRun

    run = SyntheticRun(tmp_path)
    record = RunRecord(run.dir)
    with pytest.raises(MmlabError, match=r"none yet; tracking\.trace_every is 10"):
        record.measured()
    run.start()
    run.train(4)
    run.trace()
    run.close()
    assert record.measured().step == 4
    with pytest.raises(MmlabError, match="it has steps 4"):
        record.measured(5)
