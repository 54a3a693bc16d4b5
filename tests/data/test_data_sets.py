import hashlib
import io
import json
import multiprocessing
import re
import subprocess
import sys

import numpy as np
import pytest
from data_functions import make_shapes_once
from data_helpers import numbered_shards, small_plan
from PIL import Image

from mmlab.data.datasets import ensure, make
from mmlab.data.datasets.colours import COLOURS, colour_map, colour_shares, join, name_colours
from mmlab.data.datasets.emoji import pictures, turns_of
from mmlab.data.datasets.emoji_names import concept
from mmlab.data.datasets.shapes import BACKGROUND, PLACES, RGB, SIZE, is_held_out, scene
from mmlab.data.manifest import Split
from mmlab.data.pipeline import DataSource
from mmlab.data.shards import scan_shard
from mmlab.data.sources import has_held_out
from mmlab.errors import DataError


@pytest.fixture(scope="module")
def emoji_pictures():
    return list(pictures())


@pytest.fixture(scope="module")
def emoji_folder(tmp_path_factory):
    return make("emoji", tmp_path_factory.mktemp("sets") / "emoji", samples=60)


@pytest.fixture(scope="module")
def shapes_folder(tmp_path_factory):
    return make("shapes", tmp_path_factory.mktemp("sets") / "shapes", samples=120)


def read_json(shard):
    data = shard.read_bytes()
    for sample in scan_shard(shard):
        member = sample.texts["json"]
        yield sample, json.loads(data[member.offset : member.offset + member.size]), data


# -- emoji


def test_every_named_picture_is_there_once(emoji_pictures):
    assert len(emoji_pictures) > 3900
    assert len({p.stem for p in emoji_pictures}) == len(emoji_pictures)
    assert len({p.concept.full_name for p in emoji_pictures}) == len(emoji_pictures)


def test_no_family_is_in_both_splits(emoji_pictures):
    train = {p.concept.family for p in emoji_pictures if not p.held_out}
    held_out = {p.concept.family for p in emoji_pictures if p.held_out}
    assert not train & held_out
    assert 0.05 < sum(p.held_out for p in emoji_pictures) / len(emoji_pictures) < 0.15


def test_variants_in_skin_tone_gender_and_hair_are_one_family(emoji_pictures):
    """By code points, not by the names that the families are made from."""
    same = {0x1F468: 0x1F9D1, 0x1F469: 0x1F9D1, 0x1F466: 0x1F9D1, 0x1F467: 0x1F9D1, 0x1F9D2: 0x1F9D1}
    drop = {0x200D, 0xFE0F, 0x2640, 0x2642, *range(0x1F3FB, 0x1F400), *range(0x1F9B0, 0x1F9B4)}
    families: dict[tuple, set] = {}
    for picture in emoji_pictures:
        codes = [int(code, 16) for code in picture.stem.split("-")]
        key = tuple(same.get(code, code) for code in codes if code not in drop)
        if key:
            families.setdefault(key, set()).add(picture.concept.family)
    assert max(len(variants) for variants in families.values()) == 1


@pytest.mark.parametrize(
    ("unicode_name", "category", "full_name", "family", "subject"),
    [
        ("woman running medium skin tone", "People & Body", "woman running, medium skin tone", "running", "a woman"),
        ("man red hair light skin tone", "People & Body", "man with red hair, light skin tone", "person", "a man"),
        ("woman bald", "People & Body", "bald woman", "person", "a woman"),
        ("person running", "People & Body", "person running", "running", "a person"),
        ("kiss woman man", "People & Body", "kiss, woman and man", "kiss", "a woman and a man"),
        (
            "men holding hands dark skin tone medium-light skin tone",
            "People & Body",
            "men holding hands, dark and medium-light skin tones",
            "holding hands",
            "two men",
        ),
        ("family man woman girl boy", "People & Body", "family, man, woman, girl and boy", "family", "a family"),
        ("princess", "People & Body", "princess", "royal", "a woman"),
        ("prince dark skin tone", "People & Body", "prince, dark skin tone", "royal", "a man"),
        ("thumbs up light skin tone", "People & Body", "thumbs up, light skin tone", "thumbs up", "a hand"),
        ("France", "Flags", "flag of france", "flag of france", "a flag"),
        ("pirate flag", "Flags", "pirate flag", "pirate flag", "a flag"),
        ("cat face", "Animals & Nature", "cat face", "cat face", "an animal"),
        ("woman’s hat", "Objects", "woman’s hat", "woman’s hat", "an object"),
        ("men’s room", "Symbols", "men’s room", "men’s room", "a sign"),
        ("red heart", "Smileys & Emotion", "red heart", "red heart", "a heart"),
        ("crying cat", "Smileys & Emotion", "crying cat", "crying cat", "an animal"),
        ("medium skin tone", "Component", "medium skin tone", "medium skin tone", "a sign"),
        ("orca", "", "orca", "orca", ""),
    ],
)
def test_concepts(unicode_name, category, full_name, family, subject):
    found = concept(unicode_name, category)
    assert (found.full_name, found.family, found.subject) == (full_name, family, subject)


def test_what_the_text_says_is_in_the_picture(emoji_pictures):
    """Skin tones against the name; colours against a count of the pixels made another way."""
    for picture in emoji_pictures[::97]:
        with Image.open(io.BytesIO(picture.png)) as image:
            rgba = np.asarray(image.convert("RGBA"))
        named = [COLOURS[i] for i in name_colours(rgba[rgba[..., 3] >= 128][:, :3])]
        shares = {colour: named.count(colour) / len(named) for colour in set(named)}
        for question, answer in turns_of(picture):
            said = re.findall(rf"\b({'|'.join(COLOURS)})\b", answer) if "colour" in question else []
            if "the" not in question:
                assert all(shares[colour] > 0.08 for colour in said), (picture.stem, answer, shares)
            if "skin tone" in question:
                assert answer == f"{join(picture.concept.tones)}."


def test_emoji_shards_read_back(emoji_folder):
    plan = small_plan(emoji_folder, model={"language": {"vocab_size": 1024}})
    assert has_held_out(plan)
    source, held_out = DataSource(plan), DataSource(plan, split="held_out")
    assert (len(source), len(held_out)) == (60, 7)
    names = {s.key for s in source.manifest(1, source.start(), Split())[0].samples}
    assert all(name.startswith("train-") for name in names)
    manifest, _ = held_out.manifest(1, held_out.start(), Split())
    item = held_out.item(manifest.samples[0])
    assert item["prompt"]
    assert item["truth"].endswith(".")
    assert Image.open(io.BytesIO(item["image"])).size == (72, 72)
    _, bad = held_out.pixels(manifest, range(4))
    assert not bad
    source.close()
    held_out.close()


def test_emoji_sequences_are_short(emoji_folder):
    plan = small_plan(emoji_folder, model={"language": {"vocab_size": 1024}}, data={"global_batch": 60})
    source = DataSource(plan)
    manifest, _ = source.manifest(1, source.start(), Split())
    lengths = [sample.length - 4 + 16 for sample in manifest.samples]  # with the quickstart's 16 image tokens
    assert np.mean(lengths) < 48
    assert max(lengths) <= 64  # none is cut
    source.close()


# -- colours


@pytest.mark.parametrize(
    ("rgb", "name"),
    [
        ((0, 0, 0), "black"),
        ((255, 255, 255), "white"),
        ((128, 128, 128), "grey"),
        ((221, 46, 68), "red"),  # from here on Twemoji's own palette
        ((244, 144, 12), "orange"),
        ((255, 204, 77), "yellow"),
        ((119, 178, 85), "green"),
        ((85, 172, 238), "blue"),
        ((170, 142, 214), "purple"),
        ((244, 171, 186), "pink"),
        ((193, 105, 79), "brown"),
        ((247, 222, 206), "beige"),
        ((124, 83, 62), "brown"),
        ((41, 47, 51), "black"),
    ],
)
def test_colour_names(rgb, name):
    assert COLOURS[name_colours(np.array([rgb], dtype=np.uint8))[0]] == name


def test_colour_shares_leave_out_what_is_transparent():
    rgba = np.zeros((10, 10, 4), dtype=np.uint8)
    rgba[:6] = [255, 0, 0, 255]
    rgba[6:8] = [0, 0, 255, 255]
    assert colour_shares(colour_map(rgba)) == [("red", 0.75), ("blue", 0.25)]
    assert colour_shares(colour_map(rgba[8:])) == []


# -- shapes


def test_ground_truth_matches_the_pixels(shapes_folder):
    kinds = set()
    for sample, truth, data in read_json(shapes_folder / "train-000000.tar"):
        (member,) = sample.images
        pixels = np.asarray(Image.open(io.BytesIO(data[member.offset : member.offset + member.size])))
        assert pixels.shape == (SIZE, SIZE, 3)
        left_over = (pixels != BACKGROUND).any(axis=2)
        for item in truth["objects"]:
            left, top, right, bottom = item["box"]
            mask = (pixels[top : bottom + 1, left : right + 1] == RGB[item["colour"]]).all(axis=2)
            assert mask.any(axis=0).all()  # the box fits: no empty row or column
            assert mask.any(axis=1).all()
            fill = mask.mean()
            expected = {"square": 1.0, "circle": np.pi / 4, "triangle": 0.5, "diamond": 0.5}[item["shape"]]
            assert abs(fill - expected) < 0.08
            upper = mask[: len(mask) // 2].mean() / max(mask[-(len(mask) // 2) :].mean(), 1e-9)
            assert (upper < 0.6) == (item["shape"] == "triangle")
            row, column = (top + bottom) // 2 // 32, (left + right) // 2 // 32
            assert PLACES[3 * row + column] == item["place"]
            assert (right - left > 20) == (item["size"] == "large")
            left_over[top : bottom + 1, left : right + 1] = False
            kinds.add(item["shape"])
        assert not left_over.any()  # nothing is drawn that the truth does not name
    assert kinds == {"square", "circle", "triangle", "diamond"}


def test_answers_follow_from_the_objects(shapes_folder):
    """Every kind of question answered again, from the json alone."""
    seen = set()
    for _, truth, _ in read_json(shapes_folder / "train-000000.tar"):
        objects, turns = truth["objects"], truth["conversations"]
        for asked, answered in zip(turns[::2], turns[1::2], strict=True):
            question, answer = asked["value"].removeprefix("<image>\n"), answered["value"].rstrip(".")
            seen.add(question.split()[0])
            if match := re.match(r"how many (\w+)s are there", question):
                n = sum(match[1] in ("shape", o["shape"]) for o in objects)
                assert answer == ("no", "one", "two", "three", "four")[n]
            elif match := re.match(r"what colour is the shape (?:at|in) the (.*)\?", question):
                assert [answer] == [o["colour"] for o in objects if o["place"] == match[1]]
            elif match := re.match(r"what colour is the (\w+)\?", question):
                assert [answer] == [o["colour"] for o in objects if o["shape"] == match[1]]
            elif match := re.match(r"what is (?:at|in) the (.*)\?", question):
                (item,) = [o for o in objects if o["place"] == match[1]]
                assert re.fullmatch(rf"an? {item['colour']} {item['shape']}", answer)
            elif match := re.match(r"where is the (\w+) (\w+)\?", question):
                (item,) = [o for o in objects if (o["colour"], o["shape"]) == (match[1], match[2])]
                assert re.sub(r"^(at|in) the ", "", answer) == item["place"]
            elif match := re.match(r"is there an? (\w+) (\w+)\?", question):
                there = any((o["colour"], o["shape"]) == (match[1], match[2]) for o in objects)
                assert answer == ("yes" if there else "no")
            else:
                assert question in ("describe the picture:", "what do you see?")
                found = re.findall(r"an? (\w+) (\w+) (\w+) (?:at|in) the ([a-z ]+?)(?=,| and an? |$)", answer)
                assert sorted(found) == sorted((o["size"], o["colour"], o["shape"], o["place"]) for o in objects)
    assert seen >= {"how", "what", "where", "is", "describe"}


def test_shapes_follow_from_the_seed_and_splits_share_no_content(shapes_folder, tmp_path):
    again = make("shapes", tmp_path / "again", samples=120)
    other = make("shapes", tmp_path / "other", samples=120, seed=1)
    digest = [hashlib.sha256((f / "train-000000.tar").read_bytes()).hexdigest() for f in (shapes_folder, again, other)]
    assert digest[0] == digest[1] != digest[2]
    assert (shapes_folder / "tokenizer.json").read_bytes() == (again / "tokenizer.json").read_bytes()
    content = {}
    for split in ("train", "held_out"):
        content[split] = {
            tuple(sorted((o["shape"], o["colour"], o["place"]) for o in truth["objects"]))
            for _, truth, _ in read_json(shapes_folder / f"{split}-000000.tar")
        }
    assert not content["train"] & content["held_out"]
    assert 0.05 < np.mean([is_held_out(scene(0, n)) for n in range(1000)]) < 0.15


# -- making sets


def test_progress_is_reported(tmp_path):
    seen = []
    make("shapes", tmp_path / "s", samples=10, progress=lambda done, total, what: seen.append((done, total, what)))
    assert seen
    assert all(0 <= done <= total and what for done, total, what in seen)


def test_sets_are_whole_or_absent(tmp_path):
    with pytest.raises(DataError, match='no built-in data set "emojis"'):
        make("emojis", tmp_path / "x")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").write_text("")
    with pytest.raises(DataError, match="used exists and is not empty"):
        make("shapes", tmp_path / "used", samples=5)

    def fail(done, total, what):
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="No space left"):
        make("shapes", tmp_path / "full", samples=5, progress=fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["used"]
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="Cannot write"):
        make("shapes", tmp_path / "file" / "set", samples=5)


def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r'pip install "mmlab\[demo\]"'):
        make("emoji", tmp_path / "x", samples=5)


def test_several_processes_make_a_set_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(make_shapes_once, [tmp_path / "shapes"] * 2, chunksize=1)
        pool.close()
        pool.join()
    assert len(set(results)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


def test_built_in_sets_are_made_in_the_cache_on_first_use(tmp_path, monkeypatch):
    monkeypatch.setenv("MMLAB_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    source = DataSource(small_plan("shapes", model={"language": {"vocab_size": 512}}))
    assert len(source) == 4000
    assert source.shards[0].parent == tmp_path / "shapes-1" == ensure("shapes")
    assert has_held_out(small_plan("shapes"))
    source.close()


def test_a_damaged_description_is_named(tmp_path):
    folder = numbered_shards(tmp_path)
    (folder / "dataset.json").write_text("{")
    with pytest.raises(DataError, match=r"dataset\.json: cannot be read"):
        DataSource(small_plan(folder))


def test_making_sets_and_decode_processes_need_no_torch():
    modules = "mmlab.data.datasets.emoji, mmlab.data.datasets.shapes, mmlab.data.worker, mmlab.data.sources"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
