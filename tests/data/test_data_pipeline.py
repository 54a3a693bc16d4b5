import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest
import torch
from data_helpers import conversation_json, numbered_shards, picture, small_plan, write_tar

from mmlab.data.format import Turn, build, conversation_pieces, measure, to_segments
from mmlab.data.manifest import Cursors, Split
from mmlab.data.order import Position
from mmlab.data.packed import IGNORE, pack
from mmlab.data.pipeline import DataSource
from mmlab.data.prefetch import Prefetcher
from mmlab.data.sources import has_held_out
from mmlab.data.tokenizer import TextTokenizer, train_tokenizer
from mmlab.errors import DataError

ONE = Split()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMLAB_DATA", str(tmp_path / "cache"))


@pytest.fixture
def mixed(tmp_path):
    """Eight samples: captions, a conversation, two images, a text alone and an undecodable picture."""
    files = []
    for i in range(4):
        files += [(f"cap{i}.png", picture((60 * i, 0, 0))), (f"cap{i}.txt", f"caption number {i}".encode())]
    turns = conversation_json(("<image>\nWhat is this?", "A red thing."), ("Which colour?", "Red."))
    files += [("conv.png", picture()), ("conv.json", turns)]
    files += [("two.0.png", picture((0, 0, 255))), ("two.1.png", picture((0, 255, 0)))]
    files += [("two.json", conversation_json(("<image> or <image>?", "The first.")))]
    files += [("text.txt", b"words without a picture")]
    files += [("bad.png", b"no picture at all"), ("bad.txt", b"a caption all the same")]
    write_tar(tmp_path / "mixed" / "a.tar", files)
    source = DataSource(small_plan(tmp_path / "mixed", data={"global_batch": 8}))
    yield source
    source.close()


def by_name(manifest):
    return {sample.key.partition("/")[2]: i for i, sample in enumerate(manifest.samples)}


def test_text_agrees_with_the_manifest_and_targets_are_answers_only(mixed):
    manifest, _ = mixed.manifest(1, mixed.start(), ONE)
    text = mixed.text(manifest, range(8))
    assert text.seqlens == tuple(sample.length for sample in manifest.samples)
    assert int((text.targets != IGNORE).sum()) == manifest.targets()
    assert text.image_tokens == manifest.tiles * 4
    assert text.samples == tuple(sample.key for sample in manifest.samples)
    position = by_name(manifest)["conv"]
    one = mixed.text(manifest, [position])
    answers = [t for t in one.targets.tolist() if t != IGNORE]
    ends = [i for i, t in enumerate(answers) if t == mixed.eos_id]
    assert [mixed.tokenizer.decode(answers[: ends[0]]), mixed.tokenizer.decode(answers[ends[0] + 1 : ends[1]])] == [
        "A red thing.",
        "Red.",
    ]
    assert one.input_ids[0] == mixed.tokenizer.bos_id
    assert one.image_positions.tolist() == [1, 2, 3, 4]
    shifted = one.targets[:-1][one.targets[:-1] != IGNORE]
    assert torch.equal(shifted, one.input_ids[1:][one.targets[:-1] != IGNORE])


def test_text_alone_is_all_target(mixed):
    manifest, _ = mixed.manifest(1, mixed.start(), ONE)
    position = by_name(manifest)["text"]
    text = mixed.text(manifest, [position])
    assert manifest.samples[position].tiles == 0
    assert (text.targets != IGNORE).all()
    assert mixed.tokenizer.decode(text.input_ids.tolist()) == "words without a picture"


def test_bad_pictures_are_zeros_flagged_and_masked(mixed):
    manifest, _ = mixed.manifest(1, mixed.start(), ONE)
    position = by_name(manifest)["bad"]
    pixels, bad = mixed.pixels(manifest, range(8))
    assert bad == {position}
    assert pixels.shape == (8, 3, 32, 32)
    assert "UnidentifiedImageError" in mixed.bad_reasons[manifest.samples[position].key]
    text = mixed.text(manifest, range(8), bad)
    assert int((text.targets != IGNORE).sum()) == manifest.targets(bad) < manifest.targets()
    assert text.tokens == manifest.tokens  # it stays in its place
    assert mixed.item(manifest.samples[position])["image"] is None


def test_pixels_are_in_order_and_normalised(mixed):
    manifest, _ = mixed.manifest(1, mixed.start(), ONE)
    names = by_name(manifest)
    pixels, _ = mixed.pixels(manifest, [names["two"], names["cap3"], names["text"]])
    assert pixels.dtype == torch.float32
    expected = [(-1, -1, 1), (-1, 1, -1), (180 / 127.5 - 1, -1, -1)]
    torch.testing.assert_close(pixels.mean(dim=(2, 3)), torch.tensor(expected, dtype=torch.float32))
    assert pixels.std(dim=(2, 3)).max() < 1e-6


def test_prompt_is_the_sample_up_to_its_first_answer(mixed):
    manifest, _ = mixed.manifest(1, mixed.start(), ONE)
    sample = manifest.samples[by_name(manifest)["conv"]]
    prompt, text = mixed.prompt(sample), mixed.text(manifest, [by_name(manifest)["conv"]])
    first_target = int((text.targets != IGNORE).nonzero()[0])
    assert torch.equal(prompt.input_ids, text.input_ids[: first_target + 1])
    assert (prompt.targets == IGNORE).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetcher_gives_what_the_source_gives(mixed, workers):
    first, after = mixed.manifest(1, mixed.start(), ONE)
    second, _ = mixed.manifest(2, after, ONE)
    with Prefetcher(mixed, workers) as prefetcher:
        prefetcher.submit(first, range(8))
        prefetcher.submit(second, [1, 3])
        for manifest, positions in ((first, list(range(8))), (second, [1, 3])):
            pixels, bad = prefetcher.take(manifest)
            expected, expected_bad = mixed.pixels(manifest, positions)
            assert list(pixels) == positions
            assert torch.equal(torch.cat(list(pixels.values())), expected)
            assert bad == expected_bad
        with pytest.raises(KeyError):
            prefetcher.take(first)
        prefetcher.submit(first, [0])
        prefetcher.drop()
        children = psutil.Process().children(recursive=True)
        assert bool([c for c in children if "spawn_main" in " ".join(c.cmdline())]) == bool(workers)
    assert not [c for c in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(c.cmdline())]


def test_a_dead_decode_process_is_a_readable_error(mixed):
    manifest, _ = mixed.manifest(1, mixed.start(), ONE)
    with Prefetcher(mixed, 1) as prefetcher:
        prefetcher.submit(manifest, [0])
        prefetcher.take(manifest)
        for child in psutil.Process().children(recursive=True):
            if "spawn_main" in " ".join(child.cmdline()):
                child.kill()
        deadline = time.monotonic() + 20
        with pytest.raises(DataError, match=r"data\.workers"):  # noqa: PT012 - the pool sees the death when it does
            while time.monotonic() < deadline:
                prefetcher.submit(manifest, [0])
                prefetcher.take(manifest)


_HOLD = """
if __name__ == "__main__":
    import sys, time
    from mmlab.data.pipeline import DataSource
    from mmlab.data.prefetch import Prefetcher
    from mmlab.plan.schema import Plan
    source = DataSource(Plan.model_validate_json(sys.argv[1]))
    prefetcher = Prefetcher(source, 1)
    manifest, _ = source.manifest(1, source.start())
    prefetcher.submit(manifest, [0])
    prefetcher.take(manifest)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_decode_processes_end_when_their_parent_is_killed(tmp_path):
    plan = small_plan(numbered_shards(tmp_path / "set"))
    script = tmp_path / "hold.py"
    script.write_text(_HOLD)
    process = subprocess.Popen([sys.executable, str(script), plan.model_dump_json()], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    process.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


# -- lengths


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tok") / "tokenizer.json"
    path.write_bytes(train_tokenizer(["what is this? a red apple and a green pear"] * 2, 290))
    return TextTokenizer(path)


@pytest.mark.parametrize("seq_len", [*range(6, 60), 500])
def test_measured_lengths_are_those_built(tokenizer, seq_len):
    conversations = [
        [Turn("<image>", "a red apple")],
        [Turn("", "what is this? a red apple and a green pear")],
        [Turn("<image>what is this?", "a pear"), Turn("and <image> this?", "an apple"), Turn("sure?", "")],
        [Turn("what is this? " * 4 + "<image>", "a pear")],
    ]
    for turns in conversations:
        pieces = conversation_pieces(turns, tokenizer)
        built = build(pieces, tokenizer.image_id, [4, 8], seq_len)
        images = built.ids.count(tokenizer.image_id)
        targets = sum(t != IGNORE for t in built.targets)
        whole = [0, 4, 12].index(images)  # never cut inside an image
        assert measure(to_segments(pieces), [4, 8], seq_len) == (len(built.ids), targets, whole)
        assert len(built.ids) <= seq_len
        assert tokenizer.image_id not in built.targets


def test_packing_restarts_positions(tokenizer):
    pieces = conversation_pieces([Turn("<image>what?", "a pear")], tokenizer)
    sequence = build(pieces, tokenizer.image_id, [4], 60)
    text = pack([sequence, sequence], tokenizer.image_id)
    n = len(sequence.ids)
    assert text.position_ids.tolist() == [*range(n), *range(n)]
    assert text.image_positions.tolist() == [1, 2, 3, 4, n + 1, n + 2, n + 3, n + 4]
    assert pack([], tokenizer.image_id).tokens == 0


# -- tokenizers


def test_special_tokens_written_in_a_text_are_text(tokenizer):
    ids = tokenizer.encode("an <image> and <eos> here")
    assert not {tokenizer.image_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.decode(ids) == "an <image> and <eos> here"


def test_a_foreign_tokenizer_gets_an_image_token(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    foreign = Tokenizer(models.WordLevel({"red": 0, "apple": 1, "</s>": 2, "<unk>": 3}, unk_token="<unk>"))
    foreign.pre_tokenizer = pre_tokenizers.Whitespace()
    foreign.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    tokenizer = TextTokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.image_id, tokenizer.eos_id, tokenizer.bos_id, tokenizer.vocab_size) == (4, 2, None, 5)
    assert tokenizer.encode("red apple") == [0, 1]
    write_tar(tmp_path / "set" / "a.tar", [("1.png", picture()), ("1.txt", b"red apple"), ("2.txt", b"apple red red")])
    source = DataSource(small_plan(tmp_path / "set", data={"tokenizer": str(tmp_path), "global_batch": 2}))
    manifest, _ = source.manifest(1, source.start(), ONE)
    text = source.text(manifest, range(2))
    assert sorted(text.input_ids.tolist()) == sorted([4, 4, 4, 4, 0, 1, 1, 0, 0])
    assert int((text.targets != IGNORE).sum()) == manifest.targets() == 6
    source.close()


@pytest.mark.parametrize("content", ["", "{", '{"model": 3}', "[]"])
def test_a_broken_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json: is no Hugging Face tokenizer"):
        TextTokenizer(tmp_path / "tokenizer.json")


def test_a_tokenizer_that_has_no_token_for_a_word_is_named(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"red": 0}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot encode 'blue'"):
        TextTokenizer(tmp_path / "tokenizer.json").encode("blue")


# -- what does not fit the plan


def test_a_tokenizer_larger_than_the_plan(tmp_path):
    folder = numbered_shards(tmp_path / "set")
    (folder / "tokenizer.json").write_bytes(train_tokenizer(["picture one two three"] * 3, 270))
    plan = small_plan(folder, model={"language": {"vocab_size": 200}}, parallel={"tp": 4})
    with pytest.raises(DataError, match=r"model\.language\.vocab_size = 200: .* Set model\.language\.vocab_size=2\d\d"):
        DataSource(plan)


def test_no_room_for_an_image(tmp_path):
    folder = numbered_shards(tmp_path / "set")
    with pytest.raises(DataError, match=r"data\.seq_len = 5: an image alone has 4 tokens"):
        DataSource(small_plan(folder, data={"seq_len": 5}))


def test_missing_tokenizer_and_held_out_name_their_field(tmp_path):
    folder = numbered_shards(tmp_path / "set")
    with pytest.raises(DataError, match=r"data\.tokenizer = "):
        DataSource(small_plan(folder, data={"tokenizer": "nowhere.json"}))
    plan = small_plan(folder)
    assert not has_held_out(plan)
    with pytest.raises(DataError, match=r"data\.held_out = "):
        DataSource(plan, split="held_out")
    other = numbered_shards(tmp_path / "other", shards=1, samples=3)
    plan = small_plan(folder, data={"held_out": str(other)})
    assert has_held_out(plan)
    source = DataSource(plan, split="held_out")
    assert len(source) == 3
    assert source.tokenizer.path.parent == folder  # the training shards' tokenizer reads both
    source.close()


def test_cursors_of_other_lanes_are_refused(mixed):
    with pytest.raises(DataError, match=r"data\.lanes = 3: .* Set data\.lanes=2"):
        mixed.manifest(1, Position((Cursors(0, (0, 0)),), (0,)))


def test_resume_from_cursors_gives_the_same_steps(tmp_path):
    plan = small_plan(numbered_shards(tmp_path / "set"))
    source = DataSource(plan)
    cursors, seen = source.start(), []
    for step in range(1, 6):
        manifest, cursors = source.manifest(step, cursors)
        seen.append(manifest)
        if step == 2:
            saved = json.dumps(cursors.to_json())
    again, cursors = DataSource(plan), Position.from_json(json.loads(saved))
    for manifest in seen[2:]:
        resumed, cursors = again.manifest(manifest.step, cursors)
        assert resumed == manifest
    assert Counter(s.key for m in seen for s in m.samples).most_common(1)[0][1] == 2  # 20 of 10 samples: two epochs
    source.close()
    again.close()
