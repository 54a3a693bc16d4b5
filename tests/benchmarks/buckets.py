"""How much evener buckets make the work of a step, and how much faster a step is, on lengths skewed as LLaVA's are.

The set is made here: a fifth of it text alone, texts of log-normal length (sigma 1, as conversations have), pictures of
several shapes that become up to six tiles and a thumbnail. Imbalance is largest over mean, of all steps of an epoch.
The gain is that of the busiest replica's processor time, forward and backward of every microbatch in one thread, which
other load on the machine does not touch; with --rounds also that of warm ranks that take turns (`placements.measure`),
two replicas of the laptop preset, which wants both cores for itself.

    python tests/benchmarks/buckets.py [--samples 1200] [--steps 32] [--rounds 0] [--json FILE]
"""

from __future__ import annotations

import io
import random
import statistics
import tarfile
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from bench_report import keep, machine, parser

WORDS = "a the red green blue round square dog cat house tree is on under beside small large two"
SHAPES = ((640, 480), (480, 640), (500, 500), (960, 540), (300, 900), (120, 90))
STEP = 16
"""Samples a step."""
SIDES = {
    "as they come": (),
    "dealt within a step": (f"data.bucket_window={STEP}",),
    "within 8 steps": (f"data.bucket_window={8 * STEP}",),
    "within 32 steps": (f"data.bucket_window={32 * STEP}",),
}
"""Overrides of each side; the first is what the others are compared with."""


def make_set(folder: Path, samples: int) -> Path:
    """A shard of `samples` samples."""
    from PIL import Image

    draw = random.Random(0)
    pictures = []
    for shape in SHAPES:
        buffer = io.BytesIO()
        Image.linear_gradient("L").resize(shape).convert("RGB").save(buffer, "JPEG")
        pictures.append(buffer.getvalue())
    with tarfile.open(folder / "train-000000.tar", "w") as tar:
        for number in range(samples):
            text = " ".join(draw.choices(WORDS.split(), k=min(400, max(2, round(draw.lognormvariate(3.3, 1))))))
            files = {"txt": text.encode()} | ({} if draw.random() < 0.2 else {"jpg": draw.choice(pictures)})
            for suffix, content in files.items():
                info = tarfile.TarInfo(f"{number:06d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return folder


def plan_on(folder: Path) -> Any:
    """Two replicas on two ranks, two microbatches each."""
    from mmlab.plan import Plan

    return Plan.preset("laptop").with_(
        {
            "data.path": str(folder), "data.held_out": "", "data.global_batch": STEP, "data.seq_len": 512,
            "model.language.max_positions": 512, "data.max_tiles": 6, "parallel.vision": "first_stage",
            "parallel.vision_dp": 0, "parallel.dp": 2, "parallel.pp": 1, "parallel.microbatches": 2,
        }
    )  # fmt: skip


def imbalance(plan: Any) -> dict[str, float]:
    """Means over the steps of an epoch: largest over mean of the tokens of microbatches and of replicas and of the
    tiles of encoding ranks; and of the steps' tokens, standard deviation over mean."""
    from mmlab.data.balance import balance
    from mmlab.data.pipeline import DataSource

    source = DataSource(plan)
    position, told, totals, replicas = source.start(), [], [], []
    for step in range(1, len(source) // STEP + 1):
        manifest, position = source.manifest(step, position)
        told.append(balance(manifest))
        totals.append(manifest.tokens)
        split, lengths = manifest.split, [sample.length for sample in manifest.samples]
        loads = [
            sum(lengths[i] for m in range(split.microbatches) for i in manifest.microbatch(d, m))
            for d in range(split.dp)
        ]
        replicas.append(max(loads) * len(loads) / sum(loads))
    source.close()
    return {
        "tokens": statistics.mean(entry["tokens"] for entry in told),
        "replicas": statistics.mean(replicas),
        "images": statistics.mean(entry["images"] or 1.0 for entry in told),
        "steps": statistics.pstdev(totals) / statistics.mean(totals),
    }


def busiest(plan: Any, steps: int) -> tuple[float, float]:
    """Processor seconds of a step, means over `steps` steps: of the replica with most, and of all replicas."""
    import torch

    from mmlab.data.pipeline import DataSource
    from mmlab.models.build import plain_model
    from mmlab.models.weights import init_from

    model, source = plain_model(plan, torch.float32), DataSource(plan)
    init_from(model, plan)
    position, most, mean = source.start(), [], []
    for step in range(steps + 1):
        manifest, position = source.manifest(step, position if step > 1 else source.start())  # the first one warms up
        seconds = [0.0] * manifest.split.dp
        for dp, m in product(range(manifest.split.dp), range(manifest.split.microbatches)):
            positions = manifest.microbatch(dp, m)
            text, (pixels, _) = source.text(manifest, positions), source.pixels(manifest, positions)
            began = time.process_time()
            (model(text, pixels) / manifest.targets()).backward()
            seconds[dp] += time.process_time() - began
            model.zero_grad()
        if step:
            most.append(max(seconds))
            mean.append(statistics.mean(seconds))
    source.close()
    return statistics.mean(most), statistics.mean(mean)


def measure(
    samples: int, steps: int, rounds: int, block: int = 8, sides: dict[str, tuple[str, ...]] = SIDES
) -> list[dict[str, Any]]:
    """A row a side: imbalance, processor time of the busiest replica, with `rounds` blocks of so many steps their rate
    on warm ranks."""
    import placements

    with tempfile.TemporaryDirectory(prefix="mmlab-buckets-") as folder:
        plan = plan_on(make_set(Path(folder), samples))
        rows: list[dict[str, Any]] = []
        for side, changes in sides.items():
            most, mean = busiest(plan.with_(*changes), steps)
            row = {"side": side, "busiest": most, "waiting": 1 - mean / most} | imbalance(plan.with_(*changes))
            rows.append(row | {"gain": rows[0]["busiest"] / most if rows else 1.0})
        if rounds:
            for row, timed in zip(rows, placements.measure(plan, sides, rounds, block)["rows"], strict=True):
                row["against_first"] = timed["against_first"]
    return rows


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--samples", type=int, default=1200, help="samples of the set")
    arguments.add_argument("--steps", type=int, default=32, help="steps whose processor time is taken")
    arguments.add_argument("--rounds", type=int, default=0, help="blocks of 8 steps of warm ranks of each side")
    given = arguments.parse_args()
    rows = measure(given.samples, given.steps, given.rounds)
    keep(rows, given.json)
    print(machine())
    print(f"{'side':20} microbatches  replicas  encoders  steps' deviation  waiting  gain  with ranks")
    for row in rows:
        evenness = f"{row['tokens']:12.3f}  {row['replicas']:8.3f}  {row['images']:8.3f}  {row['steps']:16.3f}"
        ranks = f"{row['against_first']:.2f}" if given.rounds else ""
        print(f"{row['side']:20} {evenness}  {row['waiting']:7.1%}  {row['gain']:4.2f}  {ranks}")


if __name__ == "__main__":
    main()
