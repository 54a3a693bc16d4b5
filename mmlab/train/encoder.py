"""The encoder's side of a step: images to image tokens, to the first stage, and gradients back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmlab.data.manifest import StepManifest
from mmlab.models.build import PartModel
from mmlab.parallel.mesh import Mesh
from mmlab.parallel.pipeline import Handler
from mmlab.plan.ops import Op
from mmlab.plan.schema import Plan
from mmlab.train.precision import compute_dtype


def token_width(plan: Plan) -> int:
    """Width of what crosses the exchange: projected tokens, or encoder features when the first stage projects."""
    return plan.model.language.hidden if plan.parallel.projector == "vision" else plan.model.vision.hidden


def token_dtype(plan: Plan) -> torch.dtype:
    """Format of what crosses the exchange."""
    return compute_dtype(plan.precision.projector if plan.parallel.projector == "vision" else plan.precision.vision)


class EncoderRunner:
    """Handlers of an encoder rank's ops.

    Rank v encodes the images that the manifest gives to owner v, for all data-parallel replicas at once, and sends
    each replica's rows to every tensor-parallel rank of its first stage; gradients come back from tp rank 0 alone
    (they are equal on all).
    """

    def __init__(self, plan: Plan, mesh: Mesh, part: PartModel) -> None:
        assert part.vision is not None
        self.plan, self.mesh, self.vision, self.projector = plan, mesh, part.vision, part.projector
        self.owner = mesh.place.vision
        self.tokens_per_tile = plan.model.vision.tokens_per_tile
        self.manifest: StepManifest | None = None
        self.pixels: Mapping[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._grads: dict[int, Tensor] = {}

    def begin(self, manifest: StepManifest, pixels: Mapping[int, Tensor]) -> None:
        """Take a step's images: `pixels[position]` [tiles, 3, S, S] for each position that this rank owns."""
        self.manifest, self.pixels = manifest, pixels
        self._outputs.clear()
        self._grads.clear()

    def handlers(self) -> dict[str, Handler]:
        """Handler of each kind of op."""
        return {
            "encode": self.encode,
            "send_tokens": self.send_tokens,
            "recv_token_grads": self.recv_token_grads,
            "encode_backward": self.encode_backward,
        }

    def _rows(self, microbatch: int) -> list[tuple[int, int]]:
        """(replica, rows of image tokens) that this rank owns in a microbatch, in row order."""
        assert self.manifest is not None
        counts: dict[int, int] = {}
        for position in self.manifest.owned(self.owner, microbatch):
            replica, _ = self.manifest.microbatch_of(position)
            counts[replica] = counts.get(replica, 0) + self.manifest.samples[position].tiles * self.tokens_per_tile
        return sorted(counts.items())

    def encode(self, op: Op) -> None:
        """Forward of this rank's images of a microbatch."""
        microbatch = op.microbatch
        assert self.manifest is not None
        positions: Sequence[int] = self.manifest.owned(self.owner, microbatch)
        if not positions:
            return
        images = torch.cat([self.pixels[position] for position in positions]).to(self.mesh.device)
        tokens = self.vision(images)
        if self.projector is not None:
            tokens = self.projector(tokens)
        self._outputs[microbatch] = tokens.flatten(0, 1).to(token_dtype(self.plan))

    def send_tokens(self, op: Op) -> None:
        """Send each replica its rows."""
        microbatch = op.microbatch
        link, layout = self.mesh.forward, self.mesh.layout
        assert link is not None
        offset = 0
        for replica, rows in self._rows(microbatch):
            part = self._outputs[microbatch][offset : offset + rows]
            offset += rows
            for tp in range(self.plan.parallel.tp):
                link.send(part, layout.rank_of(pp=0, dp=replica, cp=0, tp=tp), "tokens", microbatch)

    def recv_token_grads(self, op: Op) -> None:
        """Receive the gradients of this rank's rows."""
        microbatch = op.microbatch
        link, layout = self.mesh.backward, self.mesh.layout
        assert link is not None
        grads = []
        for replica, rows in self._rows(microbatch):
            peer = layout.rank_of(pp=0, dp=replica, cp=0, tp=0)
            shape = (rows, token_width(self.plan))
            grads.append(link.recv(shape, token_dtype(self.plan), peer, "token_grads", microbatch))
        if grads:
            self._grads[microbatch] = torch.cat(grads)

    def encode_backward(self, op: Op) -> None:
        """Backward of this rank's images of a microbatch."""
        microbatch = op.microbatch
        output = self._outputs.pop(microbatch, None)
        if output is not None and output.requires_grad:
            torch.autograd.backward(output, self._grads.pop(microbatch))
