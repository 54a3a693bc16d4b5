"""Builds the Binder environment from `binder/` alone, in a clean clone, and runs notebook 01 in it with 2 GB of memory.

`python tests/binder_environment.py [FOLDER]`, by hand: it takes some five minutes. No compiler, browser or Node is on
its path. A FOLDER that holds the environment already is used again. MMLAB_TORCH_INDEX stands in for the address of
PyTorch's CPU index (empty: none, where pip's own index has a CPU build). Prints size, time and memory; fails beyond the
limits. Linux.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from uuid import uuid4

from jupyter_process import answering, free_port

ROOT = Path(__file__).resolve().parent.parent
DISK, MEMORY = 1.4e9, 2e9
"""Bytes of the installed environment as `du` counts them, and of memory."""
LACKING = re.compile(
    r"(?:.*-)?(?:cc|c\+\+|gcc|g\+\+|cpp|clang|clang\+\+|tcc|ld|as|make|ninja|cmake)(?:-[\d.]+)?"
    r"|node|nodejs|npm|npx|chromium.*|google-chrome.*|firefox.*"
)
MARK = "MMLAB_BINDER_MARK"


def bare_path(folder: Path) -> Path:
    """A folder with this machine's programs but for compilers, browsers and Node."""
    folder.mkdir()
    for place in ("/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/local/bin"):
        for program in Path(place).glob("*"):
            if not LACKING.fullmatch(program.name) and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return folder


def requirements(text: str) -> str:
    """The requirements with the index that MMLAB_TORCH_INDEX names."""
    index = os.environ.get("MMLAB_TORCH_INDEX")
    if index is None:
        return text
    line = f"--extra-index-url {index}" if index else ""
    changed, count = re.subn(r"^--extra-index-url .*$", line, text, flags=re.MULTILINE)
    assert count == 1, "requirements.txt names one extra index"
    return changed


def variables(folder: Path) -> dict[str, str]:
    """Environment variables for what is installed and run there."""
    path = f"{folder / 'env' / 'bin'}:{folder / 'bin'}"
    fixed = {"PATH": path, "HOME": str(folder / "home"), "LANG": "C.UTF-8", MARK: uuid4().hex}
    pip = {"PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    return {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_"))} | fixed | pip


def build(folder: Path, environ: dict[str, str]) -> None:
    """Clone, install, postBuild."""
    repository, env = folder / "repository", folder / "env"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(repository)], check=True)
    version = (repository / "binder" / "runtime.txt").read_text().strip().replace("-", "")
    bare_path(folder / "bin")
    (folder / "home").mkdir()
    subprocess.run([shutil.which(version) or version, "-m", "venv", str(env)], check=True, env=environ)
    wanted = repository / "binder" / "requirements.txt"
    wanted.write_text(requirements(wanted.read_text()))
    subprocess.run([env / "bin" / "pip", "install", "-q", "-r", wanted], check=True, env=environ, cwd=repository)
    subprocess.run(["bash", repository / "binder" / "postBuild"], check=True, env=environ, cwd=repository)


def size(folder: Path) -> int:
    """Bytes that a folder takes."""
    counted = subprocess.run(["du", "-s", "--block-size=1", folder], check=True, capture_output=True, text=True)
    return int(counted.stdout.split()[0])


def limited() -> Path | None:
    """A control group that holds MEMORY (cgroup 2, else 1); None where none can be made."""
    for parent, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        group = Path(parent) / f"mmlab-binder-{os.getpid()}"
        try:
            group.mkdir()
            if not (group / "cgroup.procs").exists():
                raise OSError("no control groups there")
            (group / limit).write_text(str(int(MEMORY)))
            return group
        except OSError:
            if group.is_dir():
                group.rmdir()
    return None


class Watch(threading.Thread):
    """Samples the proportional memory of all marked processes, detached ones too; kills them beyond the limit."""

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self.mark = f"{MARK}={mark}".encode()
        self.most, self.processes, self.over = 0, 0, False
        self.end = threading.Event()

    def pids(self) -> list[int]:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark in (place / "environ").read_bytes().split(b"\0"):
                    found.append(int(place.name))
            except OSError:
                continue
        return found

    def sample(self) -> int:
        total, pids = 0, self.pids()
        for pid in pids:
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            total += 1024 * int(re.search(r"^Pss: +(\d+)", text, re.MULTILINE)[1])  # type: ignore[index]
        if total > self.most:
            self.most, self.processes = total, len(pids)
        return total

    def run(self) -> None:
        while not self.end.wait(0.5):
            if self.sample() > MEMORY:
                self.over = True
                self.kill()

    def kill(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)


def execute(folder: Path, environ: dict[str, str], group: Path | None) -> str:
    """Run notebook 01 beside a Jupyter server, as on Binder, under the limit; the executed notebook."""
    jupyter, repository = folder / "env" / "bin" / "jupyter", folder / "repository"
    files = [group / "cgroup.procs"] if group else []

    def enter() -> None:
        for procs in files:
            procs.write_text(str(os.getpid()))

    port = free_port()
    server = [jupyter, "lab", "--no-browser", "--allow-root", f"--port={port}", "--IdentityProvider.token=x"]
    command = [jupyter, "nbconvert", "--to", "notebook", "--execute", "--ExecutePreprocessor.timeout=200"]
    command += ["--output", folder / "done.ipynb", "notebooks/01_quickstart.ipynb"]
    with answering(server, port, folder / "server.log", env=environ, cwd=repository, preexec_fn=enter) as lab:
        subprocess.run(command, check=True, env=environ, cwd=repository, preexec_fn=enter, timeout=600)
        assert lab.poll() is None, (folder / "server.log").read_text()
    return (folder / "done.ipynb").read_text(encoding="utf-8")


def main(folder: Path) -> int:
    start = time.monotonic()
    environ = variables(folder)
    if not (folder / "env").exists():
        build(folder, environ)
    built, disk = time.monotonic() - start, size(folder / "env")
    print(f"environment: {disk / 1e9:.2f} GB by du, after {built:.0f} s", flush=True)
    group, watch = limited(), Watch(environ[MARK])
    watch.start()
    start = time.monotonic()
    try:
        notebook = execute(folder, environ, group)
    finally:
        watch.end.set()
        watch.join()
        left = watch.pids()
        watch.kill()
    held = "a control group" if group else "sampling"
    print(
        f"notebook 01: {time.monotonic() - start:.0f} s, {watch.processes} processes, at most {watch.most / 1e9:.2f} GB"
    )
    print(f"(proportional memory, held under {MEMORY / 1e9:.0f} GB by {held}; {len(left)} processes left)")
    assert '"image/png"' in notebook
    assert "restored before" in notebook
    if group:
        time.sleep(0.5)
        group.rmdir()
    return int(disk > DISK or watch.over or bool(left))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory() as made:
        sys.exit(main(Path(made)))
