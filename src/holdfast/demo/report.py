"""What the demo says: a line for each event, coloured and with a moving line of progress where it is a terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape

STYLES = {"differ": "bold red", "equal": "bold green", "resumed": "cyan", "killed": "red"}
"""By a word that the line has; the first one counts."""


class Report:
    """Lines with the seconds since the beginning; a context in which a terminal shows progress."""

    def __init__(self, *, to_stderr: bool = False) -> None:
        self._console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self._status = self._console.status("")
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """A line that stays."""
        style = next((style for word, style in STYLES.items() if word in text), "")
        self._console.print(f"[dim]{self.seconds:6.1f} s[/]  [{style or 'default'}]{escape(text)}[/]")

    def detail(self, text: str) -> None:
        """A line that belongs to the one above it."""
        self._console.print(f"{'':12}[dim]{escape(text)}[/]")

    def title(self, text: str) -> None:
        """What comes now."""
        self._console.print(f"\n[bold]{escape(text)}[/]")

    def progress(self, text: str) -> None:
        """What is being done now; nothing where it could not be overwritten."""
        if self._console.is_terminal:
            self._status.update(escape(text))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def __enter__(self) -> Report:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._status.stop()
