"""Packs that were broken off, and two at once."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from data_helpers import encode
from pack_helpers import captions_file, photos, tree
from PIL import Image

from mmlab.data.packing import PackOptions, pack
from mmlab.data.packing.shelf import JOURNAL, Journal, Shelf
from mmlab.errors import DataError

__all__ = ["photos"]


class Killed(BaseException):
    """Stands for kill -9 between two instructions."""


@pytest.mark.parametrize("after", range(1, 15))
def test_a_pack_that_is_broken_off_goes_on_to_the_same_bytes(photos, tmp_path, monkeypatch, after):
    source = captions_file(photos, "csv")
    options = PackOptions(samples_per_shard=3, held_out=0.3)
    pack(source, tmp_path / "whole", options)
    left = [after]

    def dying(method):
        def act(self, *arguments):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return method(self, *arguments)

        return act

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", dying(Journal.note))
        patch.setattr(Shelf, "finish", dying(Shelf.finish))
        patch.setattr(os, "rename", dying(os.rename))
        with pytest.raises(Killed):
            pack(source, tmp_path / "out", options)
    assert not (tmp_path / "out" / "manifest.json").exists()
    if (tmp_path / "out" / JOURNAL).exists():
        with open(tmp_path / "out" / JOURNAL, "ab") as file:
            file.write(b'{"next": 99, "at"')  # a note that was cut short
        if len(Journal(tmp_path / "out").read()):
            with pytest.raises(DataError, match="unfinished pack"):
                pack(source, tmp_path / "out", PackOptions(samples_per_shard=4))
    pack(source, tmp_path / "out", options)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def processors() -> float:
    """Seconds of processors that ended children of this process took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


LIMITED = """
import os, signal, sys
signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
os.execv(sys.executable, [sys.executable, "-m", "mmlab.cli", "data", "pack", *sys.argv[2:]])
"""


def packed_within(seconds: float, *arguments) -> bool:
    """Run the command; False when it needs more seconds of a processor: the kernel then ends it like kill -9. By the
    clock a busy machine would get nowhere in them, and one that was held up itself would kill too late."""
    command = [sys.executable, "-c", LIMITED, str(seconds), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert done.returncode in (0, -signal.SIGPROF), done.stderr
    return done.returncode == 0


@pytest.mark.slow
def test_killed_at_any_time_with_any_workers_it_ends_with_the_same_bytes(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    noise = os.urandom(1 << 16)
    for number in range(1200):
        pixels = bytes((byte + number) % 256 for byte in noise[number : number + 48 * 48 * 3])
        (folder / f"{number:04d}.png").write_bytes(encode(Image.frombytes("RGB", (48, 48), pixels)))
        (folder / f"{number:04d}.txt").write_text(f"noise {number}")
    options = ("--resize", 32, "--samples-per-shard", 100, "--held-out", 0.1)
    before = processors()
    assert packed_within(600, folder, tmp_path / "whole", *options, "--workers", 0)
    whole = processors() - before  # half of it to start: later kills fall later in the work
    kills, share = 0, 0.25
    while not packed_within(share * whole, folder, tmp_path / "out", *options, "--workers", kills % 3):
        kills += 1
        share += 0.05
        assert kills < 60
    assert kills >= 2
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


SLOWLY = """
import runpy, sys, time
from mmlab.data.packing.shelf import Shelf

def finish(shelf, whole=Shelf.finish):
    time.sleep(0.25)
    return whole(shelf)

Shelf.finish = finish
sys.argv = ["mmlab", "data", "pack", *sys.argv[1:]]
runpy.run_module("mmlab.cli", run_name="__main__")
"""
"""Ten seconds for 40 shards: whoever watches them may be held up meanwhile."""


@pytest.mark.slow
def test_an_interrupt_ends_all_processes_quietly_and_the_same_command_goes_on(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(400):
        (folder / f"{number:04d}.jpg").write_bytes(encode(Image.effect_noise((300, 300), 1 + number), format="JPEG"))
        (folder / f"{number:04d}.txt").write_text(f"noise {number}")
    command = [sys.executable, "-c", SLOWLY, str(folder), str(tmp_path / "out"), "--workers", "2",
               "--resize", "32", "--samples-per-shard", "10"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as process:  # fmt: skip
        while not (tmp_path / "out" / "train-000001.tar").exists():
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it, to the processes of the pack as well
        said = "".join(process.communicate(timeout=60))
    assert process.returncode == 130
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 2
    assert not (tmp_path / "out" / "manifest.json").exists()
    packed = pack(folder, tmp_path / "out", PackOptions(resize=32, samples_per_shard=10))
    assert packed.resumed >= 10  # what its first shard held was noted before the second was full
    assert packed.samples("train") == 400


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(photos, tmp_path):
    source = captions_file(photos, "csv")
    pack(source, tmp_path / "whole", PackOptions(workers=0))
    # A limit on the size of files stands for the full disk: the write fails in the same place.
    limited = f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000)); sys.argv = ['mmlab', 'data', 'pack', {str(source)!r}, {str(tmp_path / 'out')!r}, '--workers', '0']; runpy.run_module('mmlab.cli', run_name='__main__')"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "cannot be written (File too large)" in done.stderr
    assert "Traceback" not in done.stderr
    assert pack(source, tmp_path / "out", PackOptions(workers=0)).samples("train") == 12
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_two_packs_do_not_share_a_folder(photos, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    handle = os.open(out, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(DataError, match="another process packs into it"):
        pack(captions_file(photos, "csv"), out)
    os.close(handle)
    assert list(out.iterdir()) == []
