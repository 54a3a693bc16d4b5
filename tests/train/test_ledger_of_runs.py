"""The ledger of live runs: samples by name, over restores, and the same for every number of replicas and workers."""

import json

import pytest
from live import LiveRun, make_plan

from mmlab.cli import run_command
from mmlab.data.shards import scan_shard
from mmlab.errors import MmlabError
from mmlab.messages import read_events
from mmlab.messages.runs import create_run
from mmlab.tracking import RunRecord


def begun(pool, plan, root, paused=False):
    paths = create_run(root, plan.name, plan.dumps(), plan.world_size, plan.train.steps)
    run = LiveRun(pool, plan, paths.root, paused)
    return run, RunRecord(paths.root)


def test_a_restore_takes_steps_back_and_no_sample_is_lost(pool, shards, tmp_path, capfd):
    plan = make_plan(shards, "train.steps=9", "data.global_batch=12")  # 80 samples: the epoch ends in step 7
    run, record = begun(pool, plan, tmp_path, paused=True)
    run.do("step", n=3)
    run.wait_step(3)
    run.do("checkpoint", name="three")
    run.do("step", n=3)
    run.wait_step(6)
    run.do("restore", name="three")
    run.do("resume")
    run.join()
    ledger = record.ledger()
    assert ledger.ok, ledger.problems
    assert sorted(ledger.steps) == list(range(1, 10))
    assert [(first, last) for _, first, last in ledger.taken_back][-1][1] == 6
    assert [(epoch.used, epoch.size) for epoch in ledger.epochs] == [(80, 80), (28, 80)]
    shard, index, _ = ledger.steps[2][0]
    path = sorted(shards.glob("*.tar"))[shard]
    assert ledger.samples(2)[0] == f"{path.name}/{scan_shard(path)[index].key}"
    with pytest.raises(MmlabError, match="step 10 is not in the ledger; there are: 1 to 9"):
        ledger.samples(10)

    results = tmp_path / "ledger.json"
    assert run_command(["ledger", str(record.paths.root), "--steps", "2:3", "--json", str(results)]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith(f"step 2\n  {ledger.samples(2)[0]}\n")
    assert "none lost, none twice" in shown
    assert json.loads(results.read_text())["samples"]["3"] == ledger.samples(3)
    assert run_command(["ledger", str(record.paths.root), "--steps", "x"]) == 1
    assert run_command(["ledger", str(record.paths.root), "--steps", "3:2"]) == 1

    text = record.paths.ledger.read_text().splitlines(keepends=True)
    record.paths.ledger.write_text("".join(line for line in text if '"step":8' not in line))
    assert run_command(["ledger", str(record.paths.root)]) == 2
    assert "step 8 is not in the ledger" in capfd.readouterr().err


def test_a_mixture_resumes_inside_a_window(pool, shards, text_shards, tmp_path):
    sources = {"data.sources": [str(shards), str(text_shards)], "data.weights": [3, 1], "data.shuffle_window": 20}
    ahead = ("data.prefetch=4", "data.workers=1")  # what was decoded ahead is dropped
    plan = make_plan(shards, sources, "train.steps=5", "data.global_batch=12", *ahead)  # three windows
    run, record = begun(pool, plan, tmp_path, paused=True)
    run.do("step", n=2)
    run.wait_step(2)
    run.do("checkpoint", name="two")  # 24 samples: four into the second window
    run.do("step", n=2)
    run.wait_step(4)
    first = run.losses()
    run.do("restore", name="two")
    run.do("resume")
    run.join()
    assert {step: run.losses()[step] for step in (3, 4)} == {step: first[step] for step in (3, 4)}
    ledger = record.ledger()
    assert ledger.ok, ledger.problems
    used = [sum(epoch.used for epoch in ledger.epochs if epoch.source == source) for source in (0, 1)]
    assert used == [45, 15]
    queues = [event["data_queue"] for event in read_events(record.paths.events)[0] if event["kind"] == "step"]
    assert len(queues) == 7
    assert set(queues) <= set(range(5))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "prefetch"), [(0, 1), (1, 2), (2, 5), (3, 3)])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_order_depends_neither_on_replicas_nor_on_workers(pool, shards, tmp_path, dp, workers, prefetch):
    decoding = (f"data.workers={workers}", f"data.prefetch={prefetch}")
    layout = (f"parallel.dp={dp}", "parallel.pp=1", "train.steps=4", "data.global_batch=24")
    plan = make_plan(shards, *layout, *decoding)
    run, record = begun(pool, plan, tmp_path)
    run.join()
    ledger = record.ledger()
    assert ledger.ok, ledger.problems
    assert ledger.used == 96  # the order itself is compared with the plan's, which knows neither
