"""Two checkpoints side by side: how far apart their weights are, whatever saved them."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from mmlab.cluster.compare import compare
from mmlab.errors import CheckpointError
from mmlab.messages.locations import Location
from mmlab.plan import Plan
from mmlab.train import compare as compared
from mmlab.train.checkpoint.writing import Content, Save
from mmlab.train.compare import compare_weights

A = {"vision.a": torch.full((30, 40), 2.0), "language.w": torch.full((20, 50), 3.0), "language.b": torch.zeros(7)}


def save(folder, name, tensors, frozen=None, step=1, **changes):
    """A checkpoint as one rank saves it."""
    mesh = SimpleNamespace(store=None, place=SimpleNamespace(rank=0), world_size=1)
    state = {f"model.{key}": value for key, value in tensors.items()} | {"optimizer.vision.a.step": torch.ones(1)}
    frozen = {module: {f"model.{k}": v for k, v in part.items()} for module, part in (frozen or {}).items()}
    sums = {module: float(sum(value.sum() for value in part.values())) for module, part in frozen.items()}
    hashes = {module: f"{total:f}".rjust(64, "0") for module, total in sums.items()}
    plan = Plan.preset("laptop").with_(*changes.get("plan", ()))
    about = {"step": step, "lineage": "a", "periodic": True, "plan": plan.dumps(), "loss": 1.0, "reason": ""}
    made = Save(mesh, Location(folder), name, Content(state, about, frozen, hashes), name)
    made.start()
    made.wait()
    return Location(folder) / name


def modules(found):
    return {m["module"]: (m["change"], m["changed"], m["tensors"], m["same"]) for m in found["modules"]}


@pytest.mark.parametrize("batch", [1, 1 << 26])
def test_norms_of_change_by_module(tmp_path, monkeypatch, batch):
    monkeypatch.setattr(compared, "AT_ONCE", batch)
    other = {**A, "language.w": A["language.w"] * 1.01, "language.b": torch.ones(7)}
    first, second = save(tmp_path, "one", A), save(tmp_path, "two", other)
    found = compare_weights(first, second)
    change = ((0.03**2 * 1000 + 7) ** 0.5) / (9.0 * 1000) ** 0.5
    (vision, language) = modules(found).values()
    assert vision == (0.0, 0, 1, False)
    assert language[0] == pytest.approx(change, rel=1e-5)
    assert language[1:] == (2, 2, False)
    assert [t["name"] for t in found["tensors"]] == ["language.b", "language.w"]
    assert [t["change"] for t in found["tensors"]] == [None, pytest.approx(0.01, rel=1e-4)]  # from zero: no ratio
    assert (found["only"], found["reshaped"]) == ([[], []], [])


def test_a_checkpoint_is_the_same_as_itself(tmp_path):
    one = save(tmp_path, "one", A)
    found = compare_weights(one, one)
    assert {m["change"] for m in found["modules"]} == {0.0}
    assert found["tensors"] == []


def test_a_frozen_module_of_equal_content_is_not_read(tmp_path):
    frozen = {"vision": {"vision.a": A["vision.a"]}}
    rest = {key: value for key, value in A.items() if not key.startswith("vision")}
    first, second = save(tmp_path, "one", rest, frozen), save(tmp_path, "two", rest, frozen)
    (place,) = (tmp_path / ".frozen").iterdir()
    data = next(place.glob("*.distcp"))
    data.write_bytes(bytes(data.stat().st_size))  # whoever reads it finds damage
    assert modules(compare_weights(first, second))["vision"] == (0.0, 0, 0, True)
    trained = save(tmp_path, "three", {**A, "vision.a": A["vision.a"] * 2})
    with pytest.raises(CheckpointError, match="is not what was saved"):
        compare_weights(first, trained)


def test_what_was_frozen_and_then_trained_is_compared(tmp_path):
    rest = {key: value for key, value in A.items() if not key.startswith("vision")}
    first = save(tmp_path, "one", rest, {"vision": {"vision.a": A["vision.a"]}})
    second = save(tmp_path, "two", {**A, "vision.a": A["vision.a"] * 1.5})
    assert modules(compare_weights(first, second))["vision"] == (0.5, 1, 1, False)


def test_adapters_that_one_lacks_are_named(tmp_path):
    adapters = {"language.q.lora_A": torch.ones(4, 50), "language.q.lora_B": torch.zeros(50, 4)}
    base = {"language": {"language.w": A["language.w"]}}
    first, second = (
        save(tmp_path, "one", {"vision.a": A["vision.a"]}, base),
        save(tmp_path, "two", {"vision.a": A["vision.a"], **adapters}, base),
    )
    found = compare_weights(first, second)
    assert found["only"] == [[], sorted(adapters)]
    assert modules(found)["language"] == (0.0, 0, 0, True)


def test_values_that_are_not_numbers_are_said_to_be_so(tmp_path):
    broken = A["language.w"].clone()
    broken[0, 0] = float("nan")
    found = compare_weights(save(tmp_path, "one", A), save(tmp_path, "two", {**A, "language.w": broken}))
    assert modules(found)["language"][0] is None
    assert (found["tensors"][0]["name"], found["tensors"][0]["change"]) == ("language.w", None)
    json.loads(json.dumps(found, allow_nan=False))


def test_a_damaged_one_is_refused(tmp_path, capsys):
    first, second = save(tmp_path, "one", A), save(tmp_path, "two", A)
    data = next((tmp_path / "two").glob("*.distcp"))
    data.write_bytes(bytes(data.stat().st_size))
    assert compared.main([json.dumps([str(first), str(second)])]) == 1
    assert re.search("two is damaged: .* is not what was saved", capsys.readouterr().err)


def test_other_shapes_are_named(tmp_path):
    found = compare_weights(save(tmp_path, "one", A), save(tmp_path, "two", {**A, "language.b": torch.zeros(8)}))
    assert found["reshaped"] == ["language.b"]


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_in_a_process_of_its_own_with_the_plans(tmp_path):
    first, second = save(tmp_path, "one", A), save(tmp_path, "two", A, plan=["parallel.tp=2"])
    told = {"step": 1, "layout": "3 ranks", "run": "r"}
    rows = [{"name": place.name, "path": str(place), **told} for place in (first, second)]
    found = compare(*rows)
    assert [(c.key, c.before, c.after) for c in found.plan] == [("parallel.tp", 1, 2)]
    text = str(found)
    assert "one (step 1, 3 ranks) -> two (step 1, 3 ranks)" in text
    assert "language  unchanged" in text
    assert "parallel.tp" in found.html()
