"""Bytes are counted where they are handed over, and equal what the layout says must be sent."""

import pytest
from live import LiveRun
from typer.testing import CliRunner

from mmlab.cli import build_app
from mmlab.data.pipeline import DataSource
from mmlab.lab import Run
from mmlab.messages.runs import create_run
from mmlab.parallel.context.blocks import attention_plan
from mmlab.parallel.context.split import ContextGroup, Pack, split
from mmlab.plan import Plan

FP32 = 4


def counted(pool, plan):
    pool.grow(plan.world_size)
    return pool.run("train_functions:step_results", plan.dumps(), 2, ranks=plan.world_size)[0]


def formulas(plan, manifest):
    """Bytes of a step by axis. A decoder block costs two all-reduces forward and two backward (Megatron-LM)."""
    p, c = plan.parallel, plan.model.language
    source = DataSource(plan)
    hidden = heads = 0
    for m in range(p.microbatches):
        for dp in range(p.dp):
            text = source.text(manifest, manifest.microbatch(dp, m), frozenset())
            targets = int((text.targets != -100).sum())
            hidden += text.tokens
            heads += targets * (c.hidden + p.tp + 1)  # gradient of the normed rows; log-sum-exps and target logits
    source.close()
    tokens = manifest.tiles * plan.model.vision.tokens_per_tile
    row = c.hidden * FP32
    block = 4 * hidden * row
    return {
        "tp": p.tp * (c.layers * block + hidden * row + heads * FP32) if p.tp > 1 else 0,
        "pp": 2 * (p.pp - 1) * p.tp * hidden * row,
        "tokens": tokens * row * (p.tp + 1),
    }


@pytest.mark.parametrize(
    "changes", [("parallel.vision_dp=2", "parallel.tp=2", "parallel.pp=2"), ("parallel.dp=2", "parallel.pp=2")]
)
def test_counted_bytes_equal_the_formulas(pool, shards, changes):
    plan = Plan.load("laptop").with_(
        {"data.path": str(shards), "data.held_out": ""}, "parallel.microbatches=2", *changes
    )
    source = DataSource(plan)
    cursors = source.start()
    for step, result in enumerate(counted(pool, plan), start=1):
        manifest, cursors = source.manifest(step, cursors)
        found = {axis: sum(groups) for axis, groups in result["traffic"].items()}
        for axis, wanted in formulas(plan, manifest).items():
            assert found.get(axis, 0) == wanted, axis
    source.close()
    p, elements = plan.parallel, result["elements"]  # of all ranks: what each hands to the sum over its replicas
    assert found.get("vision", 0) == (elements["vision"] * FP32 if p.vision_dp > 1 else 0)
    assert found.get("projector", 0) == (elements["projector"] * FP32 if p.vision_dp > 1 else 0)
    assert found.get("language", 0) == (elements["language"] * FP32 if p.dp > 1 else 0)
    assert found.get("embedding", 0) == 2 * p.dp * plan.model.language.vocab_size * plan.model.language.hidden * FP32
    reduced = {m for m, ranks in (("vision", p.vision_dp), ("projector", p.vision_dp), ("language", p.dp)) if ranks > 1}
    assert set(result["communication"]) == reduced
    assert all(seconds > 0 and exposed >= 0 for seconds, exposed in result["communication"].values())


def ring_rows(plan, manifest):
    """(rows of keys and values sent, rows that no query sees) of a step's attentions, forward and backward, all ranks.

    Blocks are fetched twice (backward reads them again), and their gradients go back once.
    """
    p, source, sent, skipped = plan.parallel, DataSource(plan), 0, 0
    for m in range(p.microbatches):
        text = source.text(manifest, manifest.microbatch(0, m), frozenset())
        for rank in range(p.cp):
            cp = ContextGroup(None, rank, p.cp, p.cp_mode, p.cp_scope)
            cut = split(Pack(text.seqlens, text.image_positions.numpy(), 4), cp)
            exchanges = attention_plan(text.seqlens, cut, cp, plan.model.language.attention_window).exchanges
            sent += sum(2 * len(e.wanted) + e.arriving for e in exchanges)
            skipped += sum(2 * e.skipped for e in exchanges)
    source.close()
    return sent, skipped


def test_a_window_shows_in_what_the_ring_sends(pool, shards):
    base = {"data.path": str(shards), "data.held_out": ""}
    found = []
    for window in (0, 6):
        plan = Plan.load("laptop").with_(
            base, "parallel.pp=1", "parallel.cp=2", f"model.language.attention_window={window}"
        )
        source = DataSource(plan)
        manifest, _ = source.manifest(1, source.start())
        source.close()
        traffic = counted(pool, plan)[0]["traffic"]
        c = plan.model.language
        row = 2 * c.kv_heads * c.head_dim * FP32 * c.layers
        sent, skipped = (n * row for n in ring_rows(plan, manifest))
        assert (sum(traffic["cp"]), sum(traffic["cp_skipped"])) == (sent, skipped)
        found.append((sent, skipped))
    assert found[1][0] < found[0][0]
    assert found[1][1] > found[0][1]


def test_a_run_shows_its_traffic(pool, shards, tmp_path):
    plan = Plan.load("laptop").with_({"data.path": str(shards), "data.held_out": ""}, "train.steps=3")
    paths = create_run(tmp_path, plan.name, plan.dumps(), plan.world_size, plan.train.steps)
    LiveRun(pool, plan, paths.root).join()
    table = Run.open(paths.root).traffic()
    assert [row.axis for row in table.rows] == ["pp", "tokens", "embedding"]
    assert table.steps == 3
    assert table.rows[0].groups == [[1, 2]]
    assert len(table.rows[0].bytes) == 1
    ended = CliRunner().invoke(build_app(), ["traffic", str(paths.root)])
    assert ended.exit_code == 0
    assert "activations between stages" in ended.output
    assert "{1,2}" in ended.output
    assert "<table" in table._repr_mimebundle_()["text/html"]
