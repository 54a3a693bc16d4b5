from xml.etree import ElementTree

import pytest

from mmlab.models.sharding import parameter_shapes, tp_dim
from mmlab.plan import Layout, Op, Plan, measured_svg, preset_names, schedule_svg
from mmlab.plan.ops import Timed
from mmlab.plan.picture import schedule_text
from mmlab.plan.placement import amount
from mmlab.plan.schedule import rows_to_draw
from mmlab.plan.sizes import language_parameters, projector_parameters, rank_share, vision_parameters
from mmlab.plan.tables import html_table, text_table

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", preset_names())
def test_schedules_show_every_row_and_the_bubble(name):
    plan = Plan.preset(name)
    bundle = plan.schedule()._repr_mimebundle_()
    shown = texts(bundle["image/svg+xml"])
    layout = plan.layout()
    for rank in rows_to_draw(layout):
        assert f"rank {rank} · {layout.place(rank).label}" in shown
        assert f"rank {rank} · {layout.place(rank).label}" in bundle["text/plain"]
    percent = f"bubble {plan.schedule().bubble():.0%}"
    assert any(text.startswith(percent) for text in shown)
    assert percent in bundle["text/plain"]
    assert {"forward", "backward", "encode images", "update"} <= set(shown)


@pytest.mark.parametrize("name", preset_names())
def test_layouts_show_every_rank_and_node(name):
    layout = Plan.preset(name).layout()
    bundle = layout._repr_mimebundle_()
    shown = texts(bundle["image/svg+xml"])
    assert {f"node {node}" for node in range(len(layout.nodes))} <= set(shown)
    assert {str(place.rank) for place in layout.places} <= set(shown)
    for place in layout.places:
        assert place.label in bundle["text/plain"]
        assert place.label in bundle["text/html"]


def test_the_legend_of_many_kinds_stays_in_the_picture():
    plan = Plan.preset("quickstart").with_("parallel.schedule=zb_h1", "parallel.microbatches=4")
    root = ElementTree.fromstring(plan.schedule().svg())
    _, _, width, height = map(float, root.get("viewBox").split())
    for text in root.iter(f"{SVG}text"):
        if text.get("text-anchor") is None:
            assert float(text.get("x")) + 6.6 * len(text.text) < width, text.text
        assert float(text.get("y")) < height


def test_a_measured_timeline_is_drawn_to_scale():
    timeline = [[Timed(Op("forward", 7), 0.0, 1.0), Timed(Op("norm"), 1.0, 4.0)], [Timed(Op("backward", 7), 2.0, 4.0)]]
    svg = schedule_svg(timeline, "step 40 <measured>", ["stage 0 & co", "stage 1"])
    root = ElementTree.fromstring(svg)
    widths = {
        group.find(f"{SVG}title").text.partition(":")[0]: float(group.find(f"{SVG}rect").get("width"))
        for group in root.iter(f"{SVG}g")
    }
    assert widths["norm"] == pytest.approx(3 * widths["forward 7"], rel=1e-3)
    assert widths["backward 7"] == pytest.approx(2 * widths["forward 7"], rel=1e-3)
    assert "step 40 <measured>" in texts(svg)
    assert "stage 0 & co" in texts(svg)
    assert root.find(f"{SVG}rect").get("fill") == "#fff", "a light ground of its own reads in dark themes"


def test_an_empty_timeline_is_a_picture_too():
    ElementTree.fromstring(schedule_svg([[], []]))
    assert "rank 1" in schedule_text([[], []])


def test_the_text_chart_stands_in_proportion():
    timeline = [[Timed(Op("forward", 0), 0.0, 1.0), Timed(Op("backward", 0), 1.0, 3.0), Timed(Op("update"), 3.0, 4.0)]]
    assert schedule_text(timeline, ["r"], columns=16).splitlines()[0] == "r |F0--B0------uuuu|"


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("changes", [(), ("parallel.projector=first_stage",), ("model.language.attention_bias=true",)])
def test_parameter_counts_equal_the_shapes_of_the_model(name, changes):
    plan = Plan.preset(name).with_(*changes)
    sizes: dict[str, int] = {}
    for key, shape in parameter_shapes(plan).items():
        count = 1
        for length in shape:
            count *= length
        sizes[key] = count
    total = {part: sum(n for key, n in sizes.items() if key.startswith(part + ".")) for part in ("vision", "projector")}
    assert vision_parameters(plan.model.vision) == total["vision"]
    assert projector_parameters(plan) == total["projector"]
    language = {key: n for key, n in sizes.items() if key.startswith("language.")}
    assert language_parameters(plan.model.language) == sum(language.values())
    layout = Layout(plan)
    held = sum(rank_share(plan, layout, layout.place(rank)).parameters for rank in layout.pipelines[0])
    tp = plan.parallel.tp
    one_rank = sum(n // tp if tp_dim(key) is not None else n for key, n in language.items())
    tied_copy = plan.model.language.vocab_size * plan.model.language.hidden // tp
    tied = plan.model.language.tied_embeddings and plan.parallel.pp > 1
    projector = total["projector"] if plan.parallel.projector == "first_stage" else 0
    assert held == one_rank + (tied_copy if tied else 0) + projector


def test_frozen_parameters_need_no_optimizer_state():
    plan = Plan.preset("quickstart")
    share = rank_share(plan, plan.layout(), plan.layout().place(2))
    assert (share.frozen, share.state_bytes) == (0, 16 * share.trained)
    frozen = plan.with_("train.language.frozen=true")
    share = rank_share(frozen, frozen.layout(), frozen.layout().place(2))
    assert (share.trained, share.state_bytes) == (0, 4 * share.frozen)
    assert "(frozen)" in str(frozen.layout())


def test_amounts_have_three_digits():
    assert [amount(n, "B") for n in (0, 999, 1234, 5.25e6, 70e9, 1.1e12)] == [
        "0 B", "999 B", "1.23 kB", "5.25 MB", "70 GB", "1.1 TB",
    ]  # fmt: skip


def test_tables():
    assert text_table(["a", "bb"], [["1", "2\n3"], ["44", ""]]) == "a   bb\n--  --\n1   2\n    3\n44"
    assert "&lt;b&gt;<br>c" in html_table(["a"], [["<b>\nc"]])


def test_a_traced_step_is_drawn_in_seconds_with_the_planned_rows():
    plan = Plan.preset("laptop")
    timeline = plan.schedule().simulate()
    ops = [[[t.op.kind, t.op.microbatch, t.start / 50, t.end / 50] for t in row] for row in timeline]
    shown = texts(measured_svg(plan, [{"step": 40, "t0": 1000.0, "ops": row} for row in ops], "step 40, as measured"))
    assert {"step 40, as measured", "time in s", "rank 0 · vision 0", "rank 2 · stage 1 tp 0"} <= set(shown)
    assert any(text.startswith(f"bubble {plan.schedule().bubble():.0%}") for text in shown)


def test_halves_of_backward_and_chunks_are_told_apart():
    plan = Plan.preset("laptop").with_("parallel.schedule=zb_v", "parallel.microbatches=3", "data.global_batch=12")
    bundle = plan.schedule()._repr_mimebundle_()
    svg = bundle["image/svg+xml"]
    shown = texts(svg)
    assert {"forward", "backward, inputs", "backward, weights"} <= set(shown)
    assert "backward" not in shown
    assert any("paler" in text for text in shown)
    titles = [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    assert any(title.startswith("backward_weight 2 chunk 1:") for title in titles)
    assert any(title.startswith("forward 0:") for title in titles)
    text = bundle["text/plain"]
    assert {"F0", "f0", "B0", "b0", "W0", "w0"} <= {text[i : i + 2] for i in range(len(text))}
    assert "W of weights" in text
    assert "stage 0 → stage 1 and back" in plan.layout().svg()
    assert "blocks 0 and 3" in str(plan.layout())
    assert "stage 0 → stage 1, 2 times" in plan.with_("parallel.schedule=interleaved").layout().svg()
