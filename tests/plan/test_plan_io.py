import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from plan_strategies import plans

import mmlab
from mmlab.errors import PlanError
from mmlab.plan import Plan, known_keys, live_keys, preset_names, set_live
from mmlab.plan.keys import get, sections
from mmlab.plan.spelled import override
from mmlab.plan.typed import changes_of


@given(plans())
def test_plans_survive_toml_and_pickling(plan):
    assert Plan.loads(plan.dumps()) == plan
    assert Plan.loads(plan.dumps(comments=True)) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_whole_and_without_problems(name, tmp_path):
    plan = mmlab.Plan.load(name)
    assert plan == Plan.preset(name)
    assert plan.name == name
    assert list(plan.check()) == []
    path = plan.save(tmp_path / "plan.toml", comments=True)
    assert Plan.load(path) == plan
    assert Plan.load(str(path)).world_size == plan.layout().world_size


def test_presets_have_the_promised_ranks():
    assert {name: Plan.load(name).world_size for name in preset_names()} == {
        "quickstart": 6,
        "laptop": 3,
        "llava-7b": 8,
        "vlm-70b": 84,
    }


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_the_quickstart_model_admits_every_degree_up_to_four(degree):
    plan = Plan.preset("quickstart")
    if degree != 3:
        assert not plan.with_({"parallel.tp": degree}).check()
    assert not plan.with_({"parallel.pp": degree}).check()
    batch = 48 if degree == 3 else 16
    assert not plan.with_({"parallel.dp": degree, "data.global_batch": batch}).check()
    assert not plan.with_({"parallel.vision_dp": min(degree, 3)}).check()


def test_every_field_is_documented():
    undocumented = [key.name for key in known_keys().values() if len(key.doc) < 10]
    assert undocumented == []
    assert all(sections().values())


def test_commented_toml_explains_every_field():
    text = " ".join(line.lstrip("# ") for line in Plan().dumps(comments=True).splitlines())
    for key in known_keys().values():
        assert key.doc.split(". ")[0][:50] in text
    assert "(one of gpipe, 1f1b," in text


def test_a_file_wins_over_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Plan(name="mine").save("laptop")
    assert Plan.load("laptop").name == "mine"


@pytest.mark.parametrize("source", ["nowhere.toml", "quickstrat"])
def test_a_missing_file_lists_the_presets(source):
    with pytest.raises(PlanError, match=r"quickstart, laptop, llava-7b, vlm-70b") as caught:
        Plan.load(source)
    assert source in str(caught.value)
    with pytest.raises(PlanError, match="presets: quickstart"):
        Plan.preset(source)


def test_folders_and_binary_files_are_no_plans(tmp_path):
    with pytest.raises(PlanError, match="is a folder"):
        Plan.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"model\.safetensors is not TOML"):
        Plan.load(tmp_path / "model.safetensors")


def test_a_plan_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(PlanError, match="cannot write"):
        Plan().save(tmp_path / "absent" / "plan.toml")
    (tmp_path / "taken").mkdir()
    with pytest.raises(PlanError, match="taken"):
        Plan().save(tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("parallel.tp=2", "parallel.tp", 2),
        (" parallel.tp = 2 ", "parallel.tp", 2),
        ("train.language.lr=1e-4", "train.language.lr", 1e-4),
        ("train.language.lr=1", "train.language.lr", 1.0),
        ("train.vision.frozen=true", "train.vision.frozen", True),
        ("train.vision.frozen=True", "train.vision.frozen", True),
        ("parallel.schedule=gpipe", "parallel.schedule", "gpipe"),
        ('parallel.schedule="gpipe"', "parallel.schedule", "gpipe"),
        ("data.path=shards/train-{000000..000009}.tar", "data.path", "shards/train-{000000..000009}.tar"),
        ("data.path=2024", "data.path", "2024"),
        ("data.path=a=b", "data.path", "a=b"),
        ("data.tokenizer=", "data.tokenizer", ""),
        ({"parallel.tp": 2}, "parallel.tp", 2),
        ({"parallel": {"tp": 2}}, "parallel.tp", 2),
        ("parallel={tp = 2}", "parallel.tp", 2),
    ],
)
def test_overrides(override, key, value):
    plan = Plan()
    changed = plan.with_(override)
    assert get(changed, key) == value
    assert plan == Plan(), "the first plan stays as it is"
    assert [change.key for change in plan.diff(changed)] in ([key], [])


def test_one_text_may_hold_several_changes():
    """As typed on a page, in a cell and in a shell, where a comma may be left at the end of a word."""
    text = 'parallel.tp=2, parallel.layers_per_stage=[1, 2]; name="x y"'
    assert changes_of(text) == ["parallel.tp=2", "parallel.layers_per_stage=[1, 2]", 'name="x y"']
    assert changes_of("laptop parallel.tp=2,train.steps = 9 ") == ["laptop", "parallel.tp=2", "train.steps = 9"]
    assert changes_of("'my plan.toml'") == ["my plan.toml"]
    assert changes_of(" ") == []
    for bad, word in (("parallel.tp=2 and more", "'and'"), ("laptop quickstart", "'quickstart'"), ("=3", "'=3'")):
        with pytest.raises(PlanError, match=f"^{word} is no change to the plan"):
            changes_of(bad)
    plan = Plan().with_(text)
    assert (plan.parallel.tp, plan.parallel.layers_per_stage, plan.name) == (2, (1, 2), "x y")
    assert Plan().with_("parallel.tp=2,", "train.steps=9,").train.steps == 9
    lines = Plan().with_("train.steps=9\nparallel.tp=2")
    assert (lines.train.steps, lines.parallel.tp) == (9, 2)
    for whole in ("s3://x?a=1,b=2", "a folder/with spaces", "a, b"):
        assert Plan().with_(f"data.path={whole}").data.path == whole
    spelled = override("data.path", "/data/a, model.b=1")  # as a command line for it says
    assert Plan().with_(spelled).data.path == "/data/a, model.b=1"


def test_later_overrides_win():
    assert Plan().with_("parallel.tp=2", {"parallel.tp": 4, "name": "x"}).parallel.tp == 4


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("parallel.tensor=2", ["parallel.tensor", "nearest"]),
        ("paralel.tp=2", ["paralel.tp", "parallel.tp"]),
        ("tp=2", ["unknown key tp", "parallel.tp"]),
        ("data.global_bach=2", ["data.global_bach", "data.global_batch"]),
        ("train.lr=1", ["train.lr", ".lr"]),
        ("parallel.tp.x=2", ["parallel.tp.x"]),
        ("parallel=2", ["parallel", "section"]),
        ("parallel.tp", ["parallel.tp", "key=value"]),
        ("=2", ["key=value"]),
        ("parallel.tp=two", ["parallel.tp", "whole number", '"two"']),
        ("parallel.tp=true", ["parallel.tp", "whole number", "true"]),
        ("parallel.tp=1.5", ["parallel.tp", "whole number", "1.5"]),
        ("parallel.tp=0", ["parallel.tp", "at least 1"]),
        ("train.language.lr=nan", ["train.language.lr", "a number"]),
        ("train.language.beta1=1.0", ["train.language.beta1", "below 1"]),
        ("train.vision.frozen=1", ["train.vision.frozen", "true or false"]),
        ("parallel.schedule=zigzag", ["parallel.schedule", "gpipe, 1f1b"]),
        ({"parallel.tp": None}, ["parallel.tp", "whole number"]),
        ({"parallel": {"tp": [2]}}, ["parallel.tp", "whole number"]),
        (None, ["a change to a plan is", "None"]),
        (["parallel.tp=2"], ["a change to a plan is", "['parallel.tp=2']"]),
    ],
)
def test_bad_overrides_get_one_readable_line(override, parts):
    with pytest.raises(PlanError) as caught:
        Plan().with_(override)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message
    assert "pydantic" not in message


def test_every_field_at_fault_gets_its_line():
    with pytest.raises(PlanError) as caught:
        Plan().with_("parallel.tp=two", "parallel.dp=0", "train.steps=many")
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert [line.split(" = ")[0].strip() for line in lines[1:]] == ["parallel.dp", "parallel.tp", "train.steps"]


@pytest.mark.parametrize("key", [key for key in known_keys() if len(key.rpartition(".")[2]) > 4])
def test_a_key_with_a_letter_missing_leads_to_the_one_that_was_meant(key):
    section, _, leaf = key.rpartition(".")
    for at in range(1, len(leaf) - 1):
        misspelled = f"{section}.{leaf[:at]}{leaf[at + 1 :]}".lstrip(".")
        with pytest.raises(PlanError) as caught:
            Plan().with_({misspelled: 1})
        assert str(caught.value) == f"override: unknown key {misspelled}; the nearest known one is {key}"


def test_diff_shows_both_values():
    plan = Plan.preset("quickstart")
    diff = plan.diff(plan.with_("parallel.tp=4", "data.path=shapes"))
    assert [(change.key, change.before, change.after) for change in diff] == [
        ("parallel.tp", 2, 4),
        ("data.path", "emoji", "shapes"),
    ]
    assert "parallel.tp" in str(diff)
    assert "<td" in diff._repr_html_()
    assert str(plan.diff(plan)) == "no difference"


def test_live_keys_can_change_during_a_run():
    plan = Plan.preset("quickstart")
    assert {"train.language.lr", "train.clip_norm", "checkpoint.every_steps"} <= set(live_keys())
    assert "parallel.tp" not in live_keys()
    assert set_live(plan, {"train.language.lr": 5e-4}).train.language.lr == 5e-4
    assert set_live(plan, {"train": {"language": {"lr": 5e-4}}}).train.language.lr == 5e-4


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"parallel.tp": 1}, ["parallel.tp", *live_keys()]),
        ({"train.language.lr": 1e-4, "data.seed": 1}, ["data.seed", *live_keys()]),
        ({"train.langauge.lr": 1e-4}, ["train.langauge.lr", "train.language.lr"]),
        ({"train.language.lr": "fast"}, ["train.language.lr", "a number"]),
        ({"train.language.lr": -1.0}, ["train.language.lr", "at least 0"]),
    ],
)
def test_other_keys_are_refused_with_those_that_can(values, parts):
    with pytest.raises(PlanError) as caught:
        set_live(Plan(), values)
    assert all(part in str(caught.value) for part in parts)


def test_the_plan_loads_without_torch():
    code = (
        "import sys, mmlab; p = mmlab.Plan.load('vlm-70b'); p.check(); repr(p.layout()); repr(p.schedule());"
        "assert not {'torch', 'numpy', 'ipyparallel', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
