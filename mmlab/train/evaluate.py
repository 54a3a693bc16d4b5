"""Evaluation through the plan's own pipeline: held-out loss, whether the images matter, and what the model writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.data.manifest import ManifestSample, Split, StepManifest
from mmlab.data.packed import IGNORE, PackedText, TextSequence, pack
from mmlab.data.pipeline import DataSource
from mmlab.data.sources import has_held_out
from mmlab.messages import write_atomic
from mmlab.models.attention import own_ends, share
from mmlab.parallel.mesh import Mesh
from mmlab.plan.ops import Op
from mmlab.plan.schema import Plan
from mmlab.train.control import Channel
from mmlab.train.feed import own_texts
from mmlab.train.step import HybridStep, Stage, StepInput

LONGEST_ANSWER = 32
"""Most tokens that an evaluation writes for one picture."""


def swap_images(manifest: StepManifest) -> dict[int, int] | None:
    """position -> position whose images it gets instead: among samples with equally many, each gets those of the one
    half the way round. None when there are no two samples with images to swap."""
    by_tiles: dict[int, list[int]] = {}
    for position, sample in enumerate(manifest.samples):
        if sample.tiles:
            by_tiles.setdefault(sample.tiles, []).append(position)
    swapped: dict[int, int] = {}
    for positions in by_tiles.values():
        half = len(positions) // 2
        swapped |= dict(zip(positions, positions[half:] + positions[:half], strict=True))
    return swapped if any(a != b for a, b in swapped.items()) else None


class Evaluator:
    """Evaluates with the live model, between two steps, on all ranks together.

    An undecodable held-out image counts as a black picture.
    """

    def __init__(self, runner: HybridStep, plan: Plan, mesh: Mesh) -> None:
        self.runner, self.mesh = runner, mesh
        self.channel = Channel(mesh)
        self.source = DataSource(plan, split="held_out") if has_held_out(plan) else None

    def losses(self, plan: Plan, step: int) -> dict[str, Any] | None:
        """Mean held-out loss over target tokens with the right and with swapped images; None without held-out data.

        `loss_swapped` and `ratio` (swapped over right) are None where there are no images to swap.
        """
        batches = -(-plan.train.eval_samples // plan.data.global_batch)
        if self.source is None or batches == 0:
            return None
        sums = torch.zeros(2, dtype=torch.float64)
        targets, swappable, cursors = 0, True, self.source.start()
        for number in range(batches):
            manifest, cursors = self.source.manifest(number + 1, cursors)
            swap = swap_images(manifest)
            swappable = swappable and swap is not None
            targets += manifest.targets()
            sums[0] += self._loss(plan, manifest, None)
            sums[1] += self._loss(plan, manifest, swap) if swap else 0.0
        if self.mesh.control is not None:
            dist.all_reduce(sums, group=self.mesh.control)
        right, wrong = (sums / max(1, targets)).tolist()
        return {
            "loss": right, "loss_swapped": wrong if swappable else None,
            "ratio": wrong / right if swappable and right > 0 else None,
            "tokens": targets, "samples": batches * plan.data.global_batch,
        }  # fmt: skip

    def _loss(self, plan: Plan, manifest: StepManifest, swap: dict[int, int] | None) -> float:
        assert self.source is not None
        place = self.mesh.place
        texts, pixels = own_texts(plan, self.mesh, self.source, manifest), {}
        if place.vision >= 0:
            for position in manifest.owned(place.vision):
                shown = swap[position] if swap else position
                pixels[position], _ = self.source.decode_sample(manifest.samples[shown])
        return self.runner.forward(StepInput(manifest, frozenset(), texts, pixels), plan.parallel.microbatches)

    # -- what the model writes

    def samples(self, plan: Plan, folder: Path) -> list[dict[str, Any]]:
        """Write held-out pictures into a folder; returns {image, prompt, truth, text} of each (on rank 0)."""
        if self.source is None or plan.train.sample_images == 0:
            return []
        manifest = self._pictures(plan)
        if not manifest.samples:
            return []
        answers = self._generate(plan, manifest)
        return self._write(manifest, answers, folder) if self.mesh.place.rank == 0 else []

    def _pictures(self, plan: Plan) -> StepManifest:
        """The first held-out samples whose first prompt has an image, as one microbatch of replica 0."""
        assert self.source is not None
        wanted, cursors = plan.train.sample_images, self.source.start()
        found: dict[str, ManifestSample] = {}
        for number in range(4):
            manifest, cursors = self.source.manifest(number + 1, cursors)
            with_images = (self.source.prompted(sample) for sample in manifest.samples if sample.tiles)
            found |= {sample.key: sample for sample in with_images if sample.tiles}
        chosen = tuple(found.values())[:wanted]
        return StepManifest(0, chosen, Split.of(plan).one_replica())

    def _generate(self, plan: Plan, manifest: StepManifest) -> list[str]:
        """Greedy answers, by the encoder ranks and the pipeline of replica 0; known to every rank afterwards."""
        assert self.source is not None
        encoder, stage = self.runner.encoder, self.runner.stage
        answers: list[list[int]] | None = None
        with torch.no_grad():
            if encoder is not None:
                owned = manifest.owned(encoder.owner)
                encoder.begin(manifest, {p: self.source.decode_sample(manifest.samples[p])[0] for p in owned})
                encoder.encode(Op("encode", 0))
                encoder.send_tokens(Op("send_tokens", 0))
            if stage is not None and stage.replica == 0:
                answers = self._write_on(stage, manifest)
            elif stage is not None and "language" in self.runner.built.sharded:
                for _ in range(self._longest(manifest)):
                    stage.accompany()
            self.runner.end_sharded()
            self.runner.flush()
        last = self.mesh.layout.rank_of(pp=self.mesh.layout.stages.last_pp)
        ids = self.channel.gather(answers)[last]
        return [self.source.tokenizer.decode(self._until_end(answer)).strip() for answer in ids]

    def _until_end(self, ids: list[int]) -> list[int]:
        assert self.source is not None
        return ids[: ids.index(self.source.eos_id)] if self.source.eos_id in ids else ids

    @staticmethod
    def _longest(manifest: StepManifest) -> int:
        """Tokens that are written for each picture."""
        return min(LONGEST_ANSWER, 2 + max(sample.targets for sample in manifest.samples))

    def _write_on(self, stage: Stage, manifest: StepManifest) -> list[list[int]]:
        """One token for every sequence at a time; each time the whole sequences pass the pipeline (no cache)."""
        assert self.source is not None
        prompts = [self.source.prompt(sample).input_ids.tolist() for sample in manifest.samples]
        written: list[list[int]] = [[] for _ in prompts]
        stage.begin(manifest, {}, 1)
        if stage.first:
            stage.recv_tokens(Op("recv_tokens", 0))
        for number in range(self._longest(manifest)):
            rows = [prompt + answer for prompt, answer in zip(prompts, written, strict=True)]
            text = pack([TextSequence(tuple(row), (IGNORE,) * len(row)) for row in rows], self.source.image_id)
            here = share(text, stage.plan.model, self.mesh.cp).to(self.mesh.device)
            ids = self._next_ids(stage, here, stage.write_forward(here), number)
            for answer, token in zip(written, ids, strict=True):
                answer.append(token)
        return written

    def _next_ids(self, stage: Stage, text: PackedText, logits: Tensor | None, number: int) -> list[int]:
        """The next token of each sequence: known to the last stage, sent to the first; stages between need lengths."""
        assert self.source is not None
        count = len(text.seqlens)
        layout, place = self.mesh.layout, self.mesh.place
        if logits is not None:
            ids = self._most_likely(text, logits)
            if not stage.first:
                first = layout.rank_of(pp=0, dp=place.dp, cp=place.cp, tp=place.tp)
                self.mesh.forward.send(ids, first, "next_ids", number)
            return list(ids.tolist())
        if stage.first:
            last = layout.rank_of(pp=layout.stages.last_pp, dp=place.dp, cp=place.cp, tp=place.tp)
            return list(self.mesh.forward.recv((count,), torch.int64, last, "next_ids", number).tolist())
        return [0] * count

    def _most_likely(self, text: PackedText, logits: Tensor) -> Tensor:
        """int64 [B]: the most likely token after each sequence, from the logits [K, V] of those that end here."""
        assert self.source is not None
        logits = logits.float()
        logits[:, self.source.vocab_size :] = -torch.inf
        logits[:, self.source.image_id] = -torch.inf
        which, _ = own_ends(text)
        ids = which.new_zeros(len(text.seqlens)).index_copy(0, which, logits.argmax(-1))
        if self.mesh.cp.group is not None:
            dist.all_reduce(ids, group=self.mesh.cp.group)
        return ids

    def _write(self, manifest: StepManifest, answers: list[str], folder: Path) -> list[dict[str, Any]]:
        assert self.source is not None
        folder.mkdir(parents=True, exist_ok=True)
        items = []
        for number, (sample, answer) in enumerate(zip(manifest.samples, answers, strict=True)):
            item = self.source.item(sample)
            name = f"{number:02d}.png"
            if item["image"] is not None:
                write_atomic(folder / name, item["image"])
            items.append({"image": name, "prompt": item["prompt"], "truth": item["truth"], "text": answer})
        return items

    def close(self) -> None:
        """Close the held-out shards."""
        if self.source is not None:
            self.source.close()
