"""The layout as a picture and as a table: nodes, roles, layers, parameters."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from mmlab.plan.sizes import rank_share
from mmlab.plan.tables import FAINT, FONT, GRID, INK, html_table, text_table

if TYPE_CHECKING:
    from mmlab.plan.layout import Layout, Place

_CELL, _CELL_H, _HEAD, _PAD = 54, 38, 18, 8
_LETTER = 6.7
"""Width of a letter of a title, in pixels (11 px, bold; DejaVu Sans takes 6.4 in the mean)."""
_WIDE = 1040
"""Width at which nodes go to the next line, in pixels."""
HEADERS = ("rank", "node", "role", "layers", "parameters", "state")


def amount(value: float, unit: str = "") -> str:
    """A count with k, M, G or T and three digits: 1234567 -> "1.23 M"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.0f} {unit}".strip()


def held(layout: Layout, place: Place) -> str:
    """What of the model a rank holds, in words."""
    model, beside = layout.plan.model, layout.plan.parallel.projector == "vision"
    encoder = f"encoder 0-{model.vision.layers - 1}" + (", projector" if beside else "")
    if place.role == "vision":
        return encoder
    ranges = ((blocks[0], blocks[-1]) for blocks in layout.layers_of(place.pp))
    chunks = (f"{first}-{last}" if last > first else str(first) for first, last in ranges)
    parts = [encoder] if place.vision >= 0 else []
    parts += ["projector"] if layout.embeds(place) and not beside else []
    parts += ["embedding"] if layout.embeds(place) else []
    parts += [f"blocks {' and '.join(chunks)}"]
    return ", ".join([*parts, "head"] if layout.heads(place) else parts)


def layout_rows(layout: Layout) -> list[list[str]]:
    """One row a rank: rank, node, role, layers, parameters, bytes of weights with gradients and optimizer state."""
    rows = []
    for place in layout.places:
        share = rank_share(layout.plan, layout, place)
        partly = f" ({amount(share.trained)} trained)" if share.frozen else ""
        note = " (frozen)" if share.trained == 0 else partly
        row = [str(place.rank), str(place.node), place.label, held(layout, place)]
        state = amount(share.state_bytes, "B")
        state += f" + {amount(share.gathered_bytes, 'B')} gathered" if share.gathered_bytes else ""
        state += f" + {amount(share.residual_bytes, 'B')} left out" if share.residual_bytes else ""
        rows.append([*row, amount(share.parameters) + note, state])
    return rows


def summary(layout: Layout) -> str:
    """Degrees and sizes in one line."""
    p, plan = layout.plan.parallel, layout.plan
    degrees = [f"{name} {getattr(p, name)}" for name in ("dp", "tp", "pp", "cp") if getattr(p, name) > 1]
    nodes = len(layout.nodes)
    where = f"{nodes} node{'s' if nodes > 1 else ''}"
    grid = " × ".join(degrees) or "one rank"
    encoder = {
        "own_ranks": f"encoder group of {layout.first}",
        "first_stage": "encoder on the first stage",
        "all_ranks": "encoder on all ranks",
    }[p.vision]
    ranks = f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''}"
    return f"{plan.name}: {ranks} on {where}; {encoder}, language {grid}"


def layout_text(layout: Layout) -> str:
    """Summary and table in plain text."""
    return f"{summary(layout)}\n\n{text_table(HEADERS, layout_rows(layout))}"


def layout_html(layout: Layout) -> str:
    """Picture, with the table below it (folded for many ranks)."""
    table = html_table(HEADERS, layout_rows(layout))
    if layout.world_size > 16:
        table = f"<details><summary>{layout.world_size} ranks as a table</summary>{table}</details>"
    return f"<div>{layout_svg(layout)}{table}</div>"


@dataclass(frozen=True)
class _Block:
    """Ranks drawn in one frame: the encoder's of a node, or a tensor group's."""

    title: str
    places: Sequence[Place]
    colour: str

    @property
    def cell(self) -> float:
        """Width of a rank: more where the title needs it."""
        return max(_CELL, (_LETTER * len(self.title) + 2 * 7 - 2 * 3) / len(self.places))

    @property
    def width(self) -> float:
        return len(self.places) * self.cell + 2 * 3


def _colour(stage: int, stages: int) -> str:
    """Fill of a stage: from blue to violet over the pipeline."""
    hue = 0.55 + 0.27 * stage / max(1, stages - 1)
    red, green, blue = colorsys.hls_to_rgb(hue, 0.82, 0.65)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _blocks(layout: Layout, ranks: Sequence[int]) -> Iterator[_Block]:
    """The frames of one node, in rank order."""
    p = layout.plan.parallel
    groups: dict[tuple[int, ...], list[Place]] = {}
    for rank in ranks:
        place = layout.place(rank)
        groups.setdefault((place.pp, place.dp, place.cp), []).append(place)
    for (stage, dp, cp), places in groups.items():
        if places[0].role == "vision":
            yield _Block("encoder", places, "#9fdcc5")
        else:
            extra = (f" · dp {dp}" if p.dp > 1 else "") + (f" · cp {cp}" if p.cp > 1 else "")
            encodes = "encoder + " if places[0].vision >= 0 else ""
            yield _Block(f"{encodes}stage {stage}{extra}", places, _colour(stage, p.pp))


def _lines(blocks: Sequence[_Block], widest: float) -> list[list[_Block]]:
    """Blocks broken into lines of at most `widest` pixels."""
    lines: list[list[_Block]] = [[]]
    for block in blocks:
        if lines[-1] and sum(b.width + _PAD for b in lines[-1]) + block.width > widest:
            lines.append([])
        lines[-1].append(block)
    return lines


def _draw_block(block: _Block, x: float, y: float) -> str:
    height = _HEAD + _CELL_H + 3
    parts = [
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{block.width:.0f}" height="{height}" rx="6" fill="{block.colour}"/>'
        f'<text x="{x + 7:.0f}" y="{y + 13:.0f}" font-size="11" font-weight="600" fill="{INK}">{block.title}</text>'
    ]
    for i, place in enumerate(block.places):
        left, top = x + 3 + i * block.cell, y + _HEAD
        below = f"vision {place.vision}" if place.role == "vision" else f"tp {place.tp}"
        parts.append(
            f"<g><title>rank {place.rank}: {escape(place.label)}, node {place.node}</title>"
            f'<rect x="{left + 1:.0f}" y="{top}" width="{block.cell - 2:.0f}" height="{_CELL_H}" rx="4" fill="#fff" '
            f'fill-opacity="0.72"/><text x="{left + block.cell / 2:.0f}" y="{top + 17:.0f}" text-anchor="middle" '
            f'font-size="14" font-weight="600" fill="{INK}">{place.rank}</text>'
            f'<text x="{left + block.cell / 2:.0f}" y="{top + 31:.0f}" text-anchor="middle" font-size="10.5" '
            f'fill="{FAINT}">{below}</text></g>'
        )
    return "".join(parts)


def layout_svg(layout: Layout) -> str:
    """Nodes as frames, in them the encoder group and the tensor groups with their ranks. White background."""
    nodes = [list(_blocks(layout, ranks)) for ranks in layout.nodes]
    widest = max(4 * _CELL + 3 * _PAD, max(block.width for node in nodes for block in node))
    widest = widest if len(nodes) > 1 else _WIDE - 60
    x, y, row, right = 14.0, 62.0, 0.0, 0.0
    parts = []
    for index, blocks in enumerate(nodes):
        lines = _lines(blocks, widest)
        width = max(sum(b.width + _PAD for b in line) for line in lines) + _PAD
        height = len(lines) * (_HEAD + _CELL_H + 3 + _PAD) + 24
        if x > 14 and x + width > _WIDE:
            x, y, row = 14.0, y + row + 12, 0.0
        parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height}" rx="8" fill="#f8fafc" '
            f'stroke="#a0aec0"/><text x="{x + _PAD:.0f}" y="{y + 16:.0f}" font-size="12" fill="{FAINT}">node {index}'
            "</text>"
        )
        for i, line in enumerate(lines):
            at = x + _PAD
            for block in line:
                parts.append(_draw_block(block, at, y + 24 + i * (_HEAD + _CELL_H + 3 + _PAD)))
                at += block.width + _PAD
        x, row, right = x + width + 12, max(row, height), max(right, x + width)
    heading, flow = escape(summary(layout)), escape(_flow(layout))
    total, bottom = max(right + 14, 8.8 * len(heading) + 28, 6.6 * len(flow) + 28), y + row + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:.0f} {bottom:.0f}" width="{total:.0f}" '
        f'style="max-width:100%;height:auto" role="img" aria-label="{heading}" '
        f'font-family="{FONT}"><rect width="100%" height="100%" rx="8" fill="#fff" stroke="{GRID}"/>'
        f'<text x="14" y="24" font-size="15" font-weight="600" fill="{INK}">{heading}</text>'
        f'<text x="14" y="45" font-size="12" fill="{FAINT}">{flow}</text>{"".join(parts)}</svg>'
    )


def _flow(layout: Layout) -> str:
    """How data moves between the roles, in words."""
    pp, steps = layout.plan.parallel.pp, []
    what = "image tokens" if layout.plan.parallel.projector == "vision" else "image features"
    source = {"own_ranks": "encoder → ", "first_stage": "within ", "all_ranks": "all ranks → "}
    steps.append(f"{what}: {source[layout.plan.parallel.vision]}stage 0")
    if pp > 1:
        way = f"stage 0 → {'… → ' if pp > 2 else ''}stage {pp - 1}"
        if layout.stages.folded:
            way += " and back"
        elif layout.stages.chunks > 1:
            way += f", {layout.stages.chunks} times"
        steps.append(f"activations: {way}; gradients the other way")
    return "; ".join(steps)
