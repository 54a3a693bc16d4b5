"""One optimizer step with DeepSpeed between backward and update: the same batches, numbers and records as ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmlab.data.manifest import StepManifest
from mmlab.data.packed import PackedText
from mmlab.data.pipeline import joined
from mmlab.parallel.mesh import Mesh
from mmlab.parallel.pipeline import Handler
from mmlab.parallel.watch import Watch
from mmlab.plan.ops import Op
from mmlab.plan.schema import MODULES, Plan
from mmlab.train.ahead import Pixels
from mmlab.train.build import Built
from mmlab.train.deepspeed_build import ZeroModel
from mmlab.train.step import HybridStep


class WholeStage:
    """Stands where encoder and stage stand, with the whole model on every rank.

    DeepSpeed communicates while modules are called, so all ranks call them together: also when answers are written,
    which every rank then does for the same pictures.
    """

    def __init__(self, plan: Plan, mesh: Mesh, zero: ZeroModel) -> None:
        self.first, self.replica, self.loss_scale = True, 0, 1.0
        self.plan, self.mesh, self.engine = plan, mesh, zero.engine
        self.manifest: StepManifest | None = None
        self.texts: Mapping[int, PackedText] = {}
        self.pixels: Mapping[int, Tensor] = {}
        self.total_targets = 1
        self.loss_sum = torch.zeros((), dtype=torch.float64)
        self._losses: dict[int, Tensor] = {}
        self._tokens: Tensor | None = None

    def handlers(self) -> dict[str, Handler]:
        """Handler of each kind of op."""
        return {"forward": self.forward, "backward": self.backward}

    def begin(self, manifest: StepManifest, texts: Mapping[int, PackedText], total_targets: int) -> None:
        """Take a step's text."""
        self.manifest, self.texts, self.total_targets = manifest, texts, max(1, total_targets)
        self.loss_sum = torch.zeros((), dtype=torch.float64)
        self._losses.clear()

    def _images(self, positions: range | tuple[int, ...]) -> Tensor | None:
        """[N, 3, S, S]: images of some positions in order; None without any."""
        assert self.manifest is not None
        found = [self.pixels[p] for p in positions if self.manifest.samples[p].tiles]
        return joined(found).to(self.mesh.device) if found else None

    def forward(self, op: Op) -> None:
        """The whole model's forward of a microbatch."""
        assert self.manifest is not None
        positions = tuple(self.manifest.microbatch(self.mesh.place.dp, op.microbatch))
        loss = self.engine(self.texts[op.microbatch], self._images(positions))
        self.loss_sum += loss.detach().double().cpu()
        self._losses[op.microbatch] = loss

    def backward(self, op: Op) -> None:
        """Backward of a microbatch; DeepSpeed reduces gradients after each or after the last, as the plan says."""
        if op.microbatch == 0:
            self.engine.begin_step()
        self.engine.backward(self._losses.pop(op.microbatch) / self.total_targets)
        if op.microbatch < self.plan.parallel.microbatches - 1:
            self.engine.next_microbatch()
        else:
            self.engine.end_step()

    # -- what the model writes

    def recv_tokens(self, op: Op) -> None:
        """Encode the images of the pictures to write about."""
        assert self.manifest is not None
        images = self._images(tuple(range(len(self.manifest.samples))))
        self._tokens = None if images is None else self.engine(None, images)

    def accompany(self) -> None:
        """Nothing: every rank writes."""

    def write_forward(self, text: PackedText) -> Tensor:
        """Logits [B, V] at the end of each sequence."""
        ends = torch.tensor(text.seqlens).cumsum(0) - 1
        return self.engine(text, None, self._tokens, ends.to(self.mesh.device))


class PictureEncoder:
    """The encoder's side: hands the pixels to the stage of the same rank, whose forward encodes them."""

    def __init__(self, stage: WholeStage) -> None:
        self.stage, self.owner = stage, 0

    def begin(
        self, manifest: StepManifest, pixels: Mapping[int, Tensor], coming: Sequence[tuple[StepManifest, Pixels]] = ()
    ) -> None:
        """Take a step's images: `pixels[position]` [tiles, 3, S, S]."""
        self.stage.pixels = pixels

    def encode(self, op: Op) -> None:
        """Nothing: encoding is part of the stage's forward."""

    def send_tokens(self, op: Op) -> None:
        """Nothing: they are on the rank that needs them."""

    def close(self) -> None:
        """Nothing works in the background."""


class DeepSpeedStep(HybridStep):
    """Steps under DeepSpeed: its engine reduces and updates what it holds, mmlab the rest.

    Norms, clipping, learning rates and the step's own reduction are those of `HybridStep`, so whatever may change
    while a run goes on still may.
    """

    def __init__(self, plan: Plan, mesh: Mesh, built: Built, watch: Watch) -> None:
        assert built.zero is not None
        self.zero = built.zero
        super().__init__(plan, mesh, built, watch)

    def _make_runners(self) -> None:
        self.stage = stage = WholeStage(self.plan, self.mesh, self.zero)
        self.encoder = PictureEncoder(stage)
        self._handlers |= stage.handlers()

    def _reduce(self) -> None:
        self.built.reducer.finish()
        self.built.reducer.scale(1.0 / self.mesh.world_size)  # losses were multiplied: DeepSpeed averages over ranks

    def _squares(self) -> Tensor:
        return self.built.reducer.squared_norms(MODULES) + self.zero.squared_norms(MODULES)

    def _update(self, plan: Plan, step: int, factor: float) -> dict[str, float]:
        self.built.reducer.scale(factor)
        rates = self.built.optimizer.step(plan, step, self.built.reducer.grads)
        self.zero.engine.update(rates, {m: getattr(plan.train, m).weight_decay for m in MODULES}, factor)
        return rates

    def gradients(self) -> dict[str, Tensor]:
        """All gradients, whole, on every rank; all ranks together."""
        return super().gradients() | self.zero.whole_tensors("grads")

    def weights(self) -> dict[str, Tensor]:
        """All weights, whole, on every rank; all ranks together."""
        return {name: param.detach() for name, param in self.zero.outside} | self.zero.whole_tensors("weights")
