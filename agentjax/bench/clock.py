"""The clock of a run: seconds since its start, which a resumed run carries on."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True)
class Clock:
    """Seconds since `started`.

    Attributes:
        started: wall clock time at 0 s.
        zero_s: `time.perf_counter()` at 0 s.
    """

    started: datetime
    zero_s: float

    @classmethod
    def start(cls, started: datetime | None = None, least_s: float = 0.0) -> "Clock":
        """A clock at 0 s now, or one that was at 0 s at `started` and is past `least_s` now."""
        now, counter_s = datetime.now(UTC), time.perf_counter()
        if started is None:
            return cls(now, counter_s)
        return cls(started, counter_s - max(least_s, (now - started).total_seconds()))

    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.zero_s
