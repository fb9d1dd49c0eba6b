"""When to save."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Every:
    """Save every so many steps, or minutes, whichever comes first.

    Attributes:
        steps: save step n when it is a multiple of this, or when a multiple was passed since the last save.
        minutes: save when this much time has passed since the last save, or since the start.
    """

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ValueError("Every() needs steps= or minutes=")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"Every(steps={self.steps}): at least 1")
        if self.minutes is not None and self.minutes <= 0:
            raise ValueError(f"Every(minutes={self.minutes}): more than 0")

    def is_due(self, step: int, last_step: int, seconds_since: float) -> bool:
        """Whether to save `step`.

        Args:
            last_step: the last step that was saved or resumed from; 0 at the start of a run.
            seconds_since: since then.
        """
        by_steps = self.steps is not None and step // self.steps > last_step // self.steps
        by_time = self.minutes is not None and seconds_since >= self.minutes * 60
        return step > last_step and (by_steps or by_time)
