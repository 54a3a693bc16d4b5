"""Twelve captioned pictures in every form that is packed, and what a pack holds."""

import csv
import hashlib
import json
import tarfile

import pytest
from data_helpers import conversation_json, picture


@pytest.fixture
def photos(tmp_path):
    """Twelve pictures a.png to l.png, all different."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(12):
        (folder / f"{chr(97 + number)}.png").write_bytes(picture((number * 20, 255 - number * 20, 9), (40, 30)))
    return folder


def names(folder):
    return [f"{chr(97 + number)}.png" for number in range(12)]


def tree(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def packed_json(out, split="train"):
    """The json of each sample of a split, in order, with the names of its other members."""
    found = []
    for shard in sorted(out.glob(f"{split}-*.tar")):
        with tarfile.open(shard) as tar:
            members = {}
            for info in tar:
                key, _, extension = info.name.partition(".")
                members.setdefault(key, {})[extension] = tar.extractfile(info).read()
            found += [(json.loads(m.pop("json")), m) for m in members.values()]
    return found


def captions_file(folder, kind):
    """The same twelve captions in each form; the source to pack."""
    rows = [(name, f"picture {name[0]}") for name in names(folder)]
    if kind == "coco":
        path = folder.parent / "annotations" / "captions_photos.json"
        path.parent.mkdir()
        images = [{"id": n, "file_name": name} for n, (name, _) in enumerate(rows)]
        path.write_text(json.dumps({"images": images, "annotations": [
            {"image_id": n, "id": n, "caption": text} for n, (_, text) in enumerate(rows)]}))  # fmt: skip
    elif kind in ("llava", "jsonl"):
        entries = [
            {"id": n, "image": name, **json.loads(conversation_json(("<image>\nwhat?", text)))}
            for n, (name, text) in enumerate(rows)
        ]  # fmt: skip
        path = folder / f"chat.{'json' if kind == 'llava' else 'jsonl'}"
        path.write_text(json.dumps(entries) if kind == "llava" else "\n".join(map(json.dumps, entries)))
    elif kind in ("csv", "tsv"):
        path = folder.parent / f"rows.{kind}"
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, delimiter="," if kind == "csv" else "\t")
            writer.writerows([("file_name", "caption"), *((f"photos/{name}", text) for name, text in rows)])
    elif kind == "parquet":
        parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        path = folder / "rows.parquet"
        parquet.write_table(arrow.table({"image": [r[0] for r in rows], "text": [r[1] for r in rows]}), path)
    else:
        for name, text in rows:
            (folder / name).with_suffix(".txt").write_text(text)
        path = folder
    return path
