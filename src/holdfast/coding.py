"""Choosing codecs save by save: what the user asked for; and where that is `adaptive`, from samples and from what is scarce now.

A class of tensors is sampled behind the first save that has it, and anew every so many saves. The rates of the store and of the
processor are those of the saves before; so the first save is raw. Every choice that changes is logged with its reason, to the
logger `holdfast`.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from .errors import Refused
from .format import codec as codecs
from .format.codec import Codec
from .format.digest import digest
from .format.int8 import ITEM_BYTES as LOSSY_DTYPES
from .policy.coding import ADAPTIVE, LEVELS, LOSSY, Choice, Coding, Rates, Sample, Shown, another_level, choose
from .run.coder import Work
from .run.contents import TensorItem

_log = logging.getLogger("holdfast")

SMALLEST_BYTES = 16 << 10
"""Entries below this stay raw: their headers would eat up what coding gains."""
LEAST_BYTES = 16 << 20
"""A file of less says nothing about rates, and a state of less is not worth measuring."""
RENEW_SAVES = 20
_PIECES = 3
_PIECE_BYTES = (64 << 10, 1 << 20)
"""Least and most of a piece that is sampled; between them, 1/64 of its class, so that sampling takes little beside saving."""
_NUMBER_BYTES = {
    "float64": 8, "complex128": 8, "float32": 4, "complex64": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "uint64": 8, "int32": 4, "uint32": 4, "int16": 2, "uint16": 2,
}  # fmt: skip
"""Bytes of the numbers that dtypes are made of, where `planes` can take them apart."""
_MASTERS = "fp32"
"""Key of master weights in optimizer state: no moments, whatever they are named like."""
_NAMES = {level: name for name, level in LEVELS.items()}


class Class(NamedTuple):
    """Tensors that are coded alike."""

    kind: str
    """The role, or for optimizer state the role and the key: `optimizer.exp_avg`."""
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.dtype})"


def coder_of(asked: str | Mapping[str, str] | Coding | None) -> Coder | None:
    """What chooses codecs for a run's saves, or None where all is raw.

    Raises:
        ValueError: see `Coding.of`.
    """
    coding = Coding.of(asked)
    return None if coding.is_raw else Coder(coding)


class Coder:
    """The codecs of one run's saves; remembers what it has measured. See `run.coder.Coder`.

    Args:
        idle: says how many cores are idle while a file is written.
    """

    def __init__(self, coding: Coding, idle: Idle | None = None) -> None:
        self._coding, self._idle = coding, idle or IdleCores()
        self.rates = Rates(total_cores=_cores())
        self.choices: dict[Class, Choice] = {}
        """Of the last save, for classes that are adaptive."""
        self._before: dict[bool, dict[Class, Choice]] = {False: {}, True: {}}
        """Of the last save that is kept for ever, and of the last that is not."""
        self._wanted: dict[str, str] = {}
        """By name of the tensor: patterns cost more than all the rest."""
        self._samples: dict[Class, dict[str, Sample]] = {}
        self._saves = 0
        self._core_seconds = 0.0
        self._coded_bytes = 0

    def choose(self, items: Sequence[TensorItem], roles: Mapping[str, str], is_for_ever: bool) -> list[Codec]:
        wanted = [self._codec_wanted(item) for item in items]
        for item, name in zip(items, wanted, strict=True):
            if name == LOSSY:
                _check_moment(item, roles)
        if adaptive := self._adaptive(items):
            self._decide(adaptive, is_for_ever)
        chosen = [
            _codec(self._choice(item) if name == ADAPTIVE else name, item.dtype, is_for_ever) if _nbytes(item) >= SMALLEST_BYTES
            else codecs.RAW
            for item, name in zip(items, wanted, strict=True)
        ]  # fmt: skip
        self._expect(items, chosen)
        self._idle.mark()
        return chosen

    def learn(self, work: Work) -> None:
        if work.raw_bytes < LEAST_BYTES:
            return
        if not work.is_coded:
            self.rates = self.rates.after_raw(work.stored_bytes, work.writing_seconds, self._idle.cores_since_mark())
        elif self._core_seconds:
            share = work.raw_bytes / max(self._coded_bytes, work.raw_bytes)
            shown = Shown(work.raw_bytes, work.stored_bytes, work.seconds, work.writing_seconds, work.coding_seconds)
            self.rates = self.rates.after_coded(shown, share * self._core_seconds)

    def look(self, items: Sequence[TensorItem]) -> None:
        """Sample the classes that are adaptive and due. Not in `choose`: there it would wait until all is captured."""
        adaptive = self._adaptive(items)
        if sum(_nbytes(item) for of_class in adaptive.values() for item in of_class) < LEAST_BYTES:
            return
        if self._saves % RENEW_SAVES == 0:
            self._samples.clear()
            self.rates = self.rates.renewed()
        self._saves += 1
        for of, of_class in adaptive.items():
            if of not in self._samples:
                self._samples[of] = _sample(of_class, self.rates)

    def _adaptive(self, items: Sequence[TensorItem]) -> dict[Class, list[TensorItem]]:
        found: dict[Class, list[TensorItem]] = {}
        for item in items:
            if _nbytes(item) >= SMALLEST_BYTES and self._codec_wanted(item) == ADAPTIVE:
                found.setdefault(_class_of(item), []).append(item)
        return found

    def _decide(self, adaptive: Mapping[Class, Sequence[TensorItem]], is_for_ever: bool) -> None:
        """Choose anew for each class that is there."""
        if sum(_nbytes(item) for items in adaptive.values() for item in items) < LEAST_BYTES:
            self.choices = {of: Choice("raw", "there is too little of it all to matter") for of in adaptive}
            return
        self.choices = self._before[is_for_ever]
        for of in adaptive:
            samples = self._samples.get(of, {})
            may = {n: s for n, s in samples.items() if not is_for_ever or _codec(n, of.dtype).name in codecs.FOR_EVER}
            before = self.choices.get(of)
            choice = choose(may, self.rates, before.codec if before else "raw")
            level = logging.DEBUG if before and before.codec == choice.codec else logging.INFO
            _log.log(level, "coding of %s: %s: %s", of, choice.codec, choice.reason)
            self.choices[of] = choice

    def _codec_wanted(self, item: TensorItem) -> str:
        if item.name not in self._wanted:
            self._wanted[item.name] = self._coding.wanted(item.name)
        return self._wanted[item.name]

    def _choice(self, item: TensorItem) -> str:
        choice = self.choices.get(_class_of(item))
        return choice.codec if choice else "raw"

    def _expect(self, items: Sequence[TensorItem], chosen: Sequence[Codec]) -> None:
        """Remember what coding this save should take one core, to compare it with what it takes."""
        self._core_seconds, self._coded_bytes = 0.0, 0
        for item, codec in zip(items, chosen, strict=True):
            if codec != codecs.RAW:
                self._coded_bytes += _nbytes(item)
                sample = self._samples.get(_class_of(item), {}).get(_name_of(codec))
                self._core_seconds += _nbytes(item) / sample.rate if sample else 0.0


class Idle(Protocol):
    """How many cores were idle since a mark."""

    def mark(self) -> None: ...

    def cores_since_mark(self) -> float: ...


class IdleCores:
    """How many cores of this machine were idle since a mark, as the kernel counts."""

    def __init__(self) -> None:
        self._known = float("inf")
        self._marked = _jiffies()

    def mark(self) -> None:
        self._marked = _jiffies()

    def cores_since_mark(self) -> float:
        """Infinite where nothing is known; what was known before where too little time has passed."""
        idle, total = (now - then for now, then in zip(_jiffies(), self._marked, strict=True))
        if total >= 10:
            self._known = idle / total * (os.cpu_count() or 1)
        return self._known


def _jiffies() -> tuple[int, int]:
    """(idle, all) ticks of all cores since the machine started; zeros where the kernel does not tell."""
    try:
        ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks[3:5]), sum(ticks)


def _cores() -> float:
    return float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _nbytes(item: TensorItem) -> int:
    return item.source.nbytes if item.source else 0


def _class_of(item: TensorItem) -> Class:
    return Class(f"{item.role}.{item.path[-1]}" if item.owner is not None else item.role, item.dtype)


def _codec(name: str, dtype: str, is_for_ever: bool = False) -> Codec:
    """The codec of that name for a dtype; one that is as general where that one does not fit."""
    if name == "raw":
        return codecs.RAW
    if name == LOSSY and not is_for_ever:
        return codecs.int8(dtype)
    if name == "planes" and dtype in _NUMBER_BYTES and not is_for_ever:
        return codecs.planes(_NUMBER_BYTES[dtype])
    return codecs.zstd(LEVELS.get(name, codecs.ZSTD.level))


def _name_of(codec: Codec) -> str:
    """That under which a codec is sampled and chosen."""
    return _NAMES[codec.level] if codec.name == "zstd" else codec.name


def _check_moment(item: TensorItem, roles: Mapping[str, str]) -> None:
    """Raises:
    Refused: the tensor is no moment, and must not lose bits.
    """
    why = None
    if roles.get(item.role) != "optimizer" or item.owner is None or item.path[-1] == _MASTERS:
        why = "is no optimizer moment"
    elif item.dtype not in LOSSY_DTYPES:
        why = f"is {item.dtype}, not one of {', '.join(LOSSY_DTYPES)}"
    elif not item.shape:
        why = "is a scalar, which an optimizer counts or scales with"
    if why:
        raise Refused(f"{item.name} {why}, so it is not stored as {LOSSY}, which loses bits; make the pattern narrower")


def _sample(items: Sequence[TensorItem], rates: Rates) -> dict[str, Sample]:
    """Ratio and rate of the codecs that fit, from pieces out of the middle of a few tensors, spread over the class."""
    size = min(max(sum(map(_nbytes, items)) // 64, _PIECE_BYTES[0]), _PIECE_BYTES[1])
    spread = np.linspace(0, len(items) - 1, _PIECES).round().astype(int).tolist()
    pieces = [_piece(items[i], number, size) for number, i in enumerate(spread)]
    found: dict[str, Sample] = {}
    for name in ("planes", "zstd"):
        codec = _codec(name, items[0].dtype)
        if codec.name == name:
            found[name] = _measure(codec, pieces)
    while (level := another_level(found, rates)) is not None:
        found[level] = _measure(_codec(level, items[0].dtype), pieces)
    return found


def _piece(item: TensorItem, number: int, most: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    assert item.source is not None
    size = min(most, item.source.nbytes)
    size -= size % 16 if size >= 16 else 0
    room = item.source.nbytes - size
    start = room * (number + 1) // (_PIECES + 1) // 16 * 16
    piece = np.empty(size, np.uint8)
    item.source.copy_into(start, piece)
    return piece


def _measure(codec: Codec, pieces: Sequence[np.ndarray[tuple[int], np.dtype[np.uint8]]]) -> Sample:
    """Of all that a writer does with a chunk: copied, digested, coded, packed. On a fast store it is the copies that decide."""
    raw, out, block = (np.empty(max(map(len, pieces)) + 1024, np.uint8) for _ in range(3))
    codecs.encode(codec, pieces[0][:4096], out)  # so that no piece pays for what is made once
    rates, stored = [], 0
    for piece in pieces:
        start = time.perf_counter()
        np.copyto(raw[: len(piece)], piece)
        digest(raw[: len(piece)])
        coded = np.frombuffer(codecs.encode(codec, raw[: len(piece)], out), np.uint8)
        block[: len(coded)] = coded
        rates.append(len(piece) / (time.perf_counter() - start))
        stored += min(len(coded), len(piece))
    return Sample(stored / sum(map(len, pieces)), statistics.median(rates))
