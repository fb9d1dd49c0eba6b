"""The ledger: the account of a load. Every stored and every live name stands in exactly one of its lists."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Ledger:
    """The account of one load, by logical name.

    Attributes:
        step, attempt: what was loaded.
        filled: live names that got stored bytes or values. allocated: made because the live side lacked them.
        cast: name to "stored dtype -> live dtype". renamed: live name to stored name.
        waived: name to why it would have been refused. missing: live names without stored bytes. unexpected: stored names
            without a live place; both are empty unless waived or not asked for.
        live: names that kept their live value because the caller said so.
        hyper: hyper-parameter to (stored, live) where they differed.
        skipped: stored names that `select`, `exclude` or the roles given left out.
        fallbacks: newer steps that could not be used, and why.
        read_bytes: bytes read from the store.
    """

    step: int = 0
    attempt: int = 0
    filled: list[str] = field(default_factory=list)
    allocated: list[str] = field(default_factory=list)
    cast: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    waived: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)
    hyper: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    read_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The account as plain containers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"step {self.step} (attempt {self.attempt}): {len(self.filled)} filled, {len(self.allocated)} allocated"]
        for title, names in (
            ("cast", self.cast),
            ("renamed from", self.renamed),
            ("waived", self.waived),
            ("hyper", self.hyper),
        ):
            lines += [f"  {name}: {title} {detail}" for name, detail in names.items()]
        for title, listed in (("kept live", self.live), ("missing", self.missing), ("unexpected", self.unexpected)):
            lines += [f"  {name}: {title}" for name in listed]
        if self.skipped:
            lines.append(f"  {len(self.skipped)} stored names were not asked for")
        return "\n".join(lines + [f"  fell back: {why}" for why in self.fallbacks])
