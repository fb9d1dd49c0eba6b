"""Real power cuts: a run on a loop-mounted filesystem that is shut down at a random instant, mounted again, and opened.

The shutdown (`xfs_io -x -c shutdown`) drops everything that is not on the device, the journal included, as a power
cut does. Needs root, loop devices and the tools; skipped with the reason elsewhere. `HOLDFAST_POWER_CUTS` sets how
many.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .truth import Facts, observe, violations
from .workload import serving

pytestmark = pytest.mark.slow

CUTS = int(os.environ.get("HOLDFAST_POWER_CUTS", "200" if os.environ.get("HOLDFAST_SOAK") == "1" else "10"))
CUTS_OF_ONE_RUN = 5
IMAGE_BYTES = 400 << 20
SHOWN = 60
LONGEST_SECONDS = 0.5
TOOL_SECONDS = 60
FORMAT = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}


def tool(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


@dataclass
class Disk:
    """A loop device, where it is mounted, and how to cut its power."""

    device: str
    mount: Path

    def cut(self) -> None:
        tool("xfs_io", "-x", "-c", "shutdown", str(self.mount))

    def mount_again(self) -> None:
        tool("umount", str(self.mount))
        tool("mount", self.device, str(self.mount))


@contextlib.contextmanager
def formatted(kind: str, directory: Path) -> Iterator[Disk]:
    """A new filesystem of that kind; unmounted and detached whatever happens."""
    image, mount = directory / "disk.img", directory / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    tool(*FORMAT[kind], str(image))
    device = tool("losetup", "--find", "--show", str(image))
    try:
        tool("mount", device, str(mount))
        try:
            yield Disk(device, mount)
        finally:
            subprocess.run(["umount", str(mount)], capture_output=True, timeout=TOOL_SECONDS)
            if os.path.ismount(mount):
                subprocess.run(["umount", "--lazy", str(mount)], capture_output=True, timeout=TOOL_SECONDS)
    finally:
        subprocess.run(["losetup", "--detach", device], capture_output=True, timeout=TOOL_SECONDS)
        image.unlink()


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    kind = request.param
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    needed = [FORMAT[kind][0], "xfs_io", "losetup", "mount", "umount"]
    if missing := [name for name in needed if not shutil.which(name)]:
        pytest.skip(f"{', '.join(missing)} not found: install xfsprogs and e2fsprogs")
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(formatted(kind, tmp_path))
        except OSError as error:
            pytest.skip(f"this machine cannot mount a loop device with {kind}: {error}")
        yield disk


@pytest.mark.timeout(max(120, CUTS * 5))
@pytest.mark.parametrize("disk", list(FORMAT), indirect=True)
def test_a_power_cut_loses_nothing_that_was_announced(disk: Disk) -> None:
    seed = int(os.environ.get("HOLDFAST_SEED", "0")) or random.randrange(1 << 30)
    rng = random.Random(seed)
    done, interrupted = 0, 0
    story: list[str] = []
    with serving() as server:
        for cut in range(CUTS):
            if cut % CUTS_OF_ONE_RUN == 0:
                path, facts = disk.mount / f"run{cut}", Facts()
            child = server.start(path, rng.randrange(1 << 30), facts)
            patience = 1 if done else 1 + cut  # where nothing was done yet, the machine is slow
            child.run_for(rng.random() * LONGEST_SECONDS * patience)
            failed_before = list(child.errors)
            disk.cut()
            child.end()
            story += [*child.story, "killed"]
            disk.mount_again()
            seen = observe(path)
            broken = [*failed_before, *violations(child.window, seen)]
            assert not broken, f"cut {cut} of seed {seed}, during {child.begun}: {broken}; {story[-SHOWN:]}"
            facts = seen.facts()
            done += child.done
            interrupted += child.begun is not None
    print(f"{CUTS} power cuts, {interrupted} of them inside an operation; {done} operations were announced")
    assert done, "nothing was announced before a cut"
