"""What a result was measured on: the machine, and the versions of what was compared."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("holdfast", "torch", "numpy", "safetensors", "torchsnapshot", "torch_checkpointing", "nvidia-resiliency-ext")


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{package: installed(package) for package in PACKAGES}}


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def describe(directory: Path) -> dict[str, str | int]:
    """The machine, and the file system that holds `directory`."""
    return {
        "processor": processor(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "file_system": file_system(directory),
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def file_system(directory: Path) -> str:
    """Its type and options, without the name of the device or of the place."""
    holders = [mount for mount in psutil.disk_partitions(all=True) if directory.resolve().is_relative_to(mount.mountpoint)]
    if not holders:
        return "unknown"
    mount = max(holders, key=lambda mount: len(mount.mountpoint))
    return f"{mount.fstype} ({mount.opts})"
