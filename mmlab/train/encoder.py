"""The encoder's side of a step: images to image tokens, to the first stage, and gradients back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from mmlab.data.manifest import StepManifest
from mmlab.data.pipeline import joined
from mmlab.models.build import PartModel
from mmlab.parallel.mesh import Mesh
from mmlab.parallel.pipeline import Handler
from mmlab.plan.encoder_ops import encoded_with
from mmlab.plan.ops import Op
from mmlab.plan.schema import Plan
from mmlab.train.ahead import EncodeAhead, Pixels, Trace
from mmlab.train.tokens import Route, token_dtype, token_width


class EncoderRunner:
    """Handlers of the ops of a rank that encodes.

    The rank encodes the images that the manifest gives to its index `place.vision`, of `parallel.encoder_batch`
    microbatches and all data-parallel replicas at once, and sends each replica's rows as `train.tokens` says. With
    `parallel.encoder_ahead` the features come from a queue; `trace` is told when what was encoded.
    """

    def __init__(self, plan: Plan, mesh: Mesh, part: PartModel, trace: Trace) -> None:
        assert part.vision is not None
        self.plan, self.mesh, self.vision = plan, mesh, part.vision
        self.projector = part.projector if plan.parallel.projector == "vision" else None
        self.sharded = isinstance(self.vision, FSDPModule) or isinstance(self.projector, FSDPModule)
        """Whether a rank without images computes on none: it takes part in gathering weights for those that have."""
        self.owner = mesh.place.vision
        self.together = plan.parallel.encoder_batch
        self.tokens_per_tile = plan.model.vision.tokens_per_tile
        self.ahead = EncodeAhead(self.features, trace) if plan.parallel.encoder_ahead else None
        self.manifest: StepManifest | None = None
        self.pixels: Mapping[int, Tensor] = {}
        self.coming: Sequence[tuple[StepManifest, Pixels]] = ()
        self._outputs: dict[int, Tensor] = {}
        self._grads: dict[int, Tensor] = {}
        self._routes: dict[tuple[int, int], Route] = {}

    def begin(
        self, manifest: StepManifest, pixels: Mapping[int, Tensor], coming: Sequence[tuple[StepManifest, Pixels]] = ()
    ) -> None:
        """Take a step's images: `pixels[position]` [tiles, 3, S, S] for each position that this rank owns; `coming` are
        the steps that are to be encoded ahead."""
        self.manifest, self.pixels, self.coming = manifest, pixels, coming
        for store in (self._outputs, self._grads, self._routes):
            store.clear()

    def handlers(self) -> dict[str, Handler]:
        """Handler of each kind of op."""
        return {
            "encode": self.encode,
            "send_tokens": self.send_tokens,
            "recv_token_grads": self.recv_token_grads,
            "encode_backward": self.encode_backward,
            "encode_ahead": self.encode_ahead,
        }

    def _together(self, manifest: StepManifest, microbatch: int) -> range:
        """The microbatches of a step that are encoded with one."""
        return encoded_with(microbatch, self.together, manifest.split.microbatches)

    def _rows(self, microbatch: int) -> dict[int, int]:
        """replica -> rows of image tokens that this rank owns in a microbatch, in row order."""
        assert self.manifest is not None
        counts: dict[int, int] = {}
        for position in self.manifest.owned(self.owner, microbatch):
            replica, _ = self.manifest.microbatch_of(position)
            counts[replica] = counts.get(replica, 0) + self.manifest.samples[position].tiles * self.tokens_per_tile
        return counts

    def features(self, manifest: StepManifest, pixels: Mapping[int, Tensor], microbatch: int) -> Tensor | None:
        """[N, P, D] of this rank's images of a microbatch and of those encoded with it; None where nothing is done."""
        group = self._together(manifest, microbatch)
        positions = [position for m in group for position in manifest.owned(self.owner, m)]
        if not positions and not self.sharded:
            return None
        side = self.plan.model.vision.image_size
        images = joined([pixels[position] for position in positions] or [torch.empty(0, 3, side, side)])
        found: Tensor = self.vision(images.to(self.mesh.device))
        return found

    def encode_ahead(self, _: Op) -> None:
        """Have the steps to come encoded while the pipeline works on this one; returns at once."""
        assert self.ahead is not None
        microbatches = self.plan.parallel.microbatches
        self.ahead.ask(self.coming, range(0, microbatches, self.together))

    def encode(self, op: Op) -> None:
        """Forward of this rank's images of a microbatch and of those encoded with it, as far as it is not done yet."""
        assert self.manifest is not None
        queued = self.ahead.take(self.manifest, op.microbatch) if self.ahead is not None else None
        tokens = queued.result() if queued is not None else self.features(self.manifest, self.pixels, op.microbatch)
        if tokens is None:
            return
        if self.projector is not None:
            tokens = self.projector(tokens)
        self._outputs[op.microbatch] = tokens.flatten(0, 1).to(token_dtype(self.plan))

    def _output(self, microbatch: int) -> Tensor:
        """The rows of one microbatch among those encoded with it."""
        assert self.manifest is not None
        group = self._together(self.manifest, microbatch)
        start = sum(sum(self._rows(m).values()) for m in range(group[0], microbatch))
        return self._outputs[group[0]][start : start + sum(self._rows(microbatch).values())]

    def _route(self, replica: int, microbatch: int) -> Route:
        """How a replica's tokens of a microbatch travel; the gradients go the same way back."""
        assert self.manifest is not None
        if (replica, microbatch) not in self._routes:
            self._routes[replica, microbatch] = Route(self.mesh.layout, self.manifest, replica, microbatch)
        return self._routes[replica, microbatch]

    def send_tokens(self, op: Op) -> None:
        """Send each replica its rows."""
        microbatch, counts = op.microbatch, self._rows(op.microbatch)
        if not counts:
            return
        for replica, rows in zip(counts, self._output(microbatch).split(list(counts.values())), strict=True):
            for rank, piece in self._route(replica, microbatch).receivers(self.owner):
                self.mesh.tokens.send(rows[piece.start : piece.stop], rank, "tokens", microbatch)

    def recv_token_grads(self, op: Op) -> None:
        """Receive the gradients of this rank's rows; what context-parallel ranks give back is summed."""
        microbatch, grads = op.microbatch, []
        for replica, count in self._rows(microbatch).items():
            grad = torch.zeros((count, token_width(self.plan)), dtype=token_dtype(self.plan), device=self.mesh.device)
            for rank, piece in self._route(replica, microbatch).returners(self.owner):
                shape = (piece.stop - piece.start, grad.shape[1])
                grad[piece.start : piece.stop] += self.mesh.token_grads.recv(
                    shape, grad.dtype, rank, "token_grads", microbatch
                )
            grads.append(grad)
        if grads:
            self._grads[microbatch] = torch.cat(grads)

    def encode_backward(self, op: Op) -> None:
        """Backward of this rank's images of a microbatch and of those encoded with it."""
        assert self.manifest is not None
        group = self._together(self.manifest, op.microbatch)
        output = self._outputs.pop(group[0], None)
        if output is not None and output.requires_grad:
            grads = [self._grads.pop(m) for m in group if m in self._grads]
            torch.autograd.backward(output, torch.cat([torch.zeros_like(output[:0]), *grads]))

    def close(self) -> None:
        """End the thread that works ahead."""
        if self.ahead is not None:
            self.ahead.close()
