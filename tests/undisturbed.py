"""The clock of a server that other work on the machine does not move: it stands still while the server waits
for a core.

The kernel counts how long each thread has been ready to run without running (`/proc/PID/task/TID/schedstat`).
Less that time of the thread that computes, the instants of a recording are those of a machine with a core
to spare: sleeping and computing count, waiting behind other processes does not.
"""

import threading
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np

from agentjax.records import Recording

PERIOD_S = 0.004


class Undisturbed(threading.Thread):
    """Samples a server while it is played on, and then takes its waiting out of recordings.

    Where the kernel does not count (another system than Linux), the clock is the wall's.
    """

    def __init__(self, process: int):
        super().__init__(daemon=True)
        self.tasks = Path(f"/proc/{process}/task")
        self.samples: dict[str, list[tuple[float, int, int]]] = {}
        self.ended = threading.Event()
        self._cached: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def __enter__(self) -> "Undisturbed":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()

    def run(self) -> None:
        while not self.ended.wait(PERIOD_S):
            for file in self.tasks.glob("*/schedstat"):
                try:
                    computed, waited, _ = map(int, file.read_bytes().split())
                except (OSError, ValueError):  # a thread that has ended
                    continue
                self.samples.setdefault(file.parent.name, []).append((time.time(), computed, waited))

    def at_s(self, unix_s: np.ndarray) -> np.ndarray:
        """The clock at instants of the wall's (s since 1970).

        A wait is counted as it ends; it is taken to have come right before the sample that first has it.
        """
        if not self.samples:
            return unix_s
        at, waited_s, latest = self._counted()
        before = np.searchsorted(at, unix_s, side="right") - 1
        return np.minimum(unix_s - waited_s[np.maximum(before, 0)], latest[before + 1])

    def _counted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Instants of the samples, what the computing thread had waited, and the clock's bound up to each."""
        if self._cached is None or not self.ended.is_set():
            threads = [np.array(list(samples)) for samples in self.samples.values()]
            at, _, waited = max(threads, key=lambda samples: np.ptp(samples[:, 1])).T
            clock = at - waited / 1e9
            latest = np.append(np.minimum.accumulate(clock[::-1])[::-1], np.inf)  # it does not run backwards
            self._cached = at, waited / 1e9, latest
        return self._cached

    def slowness(self, recording: Recording) -> float:
        """Seconds of the wall's clock that one second of this one took, over a recording."""
        zero_s = datetime.fromisoformat(recording.about["started"]).timestamp()
        last_s = max(record.finished_s for record in recording.requests)
        return last_s / float(np.diff(self.at_s(zero_s + np.array([0.0, last_s])))[0])

    def recording(self, recording: Recording) -> Recording:
        """The recording with all its times on the undisturbed clock."""
        zero_s = datetime.fromisoformat(recording.about["started"]).timestamp()

        def undisturbed(times_s):
            return self.at_s(zero_s + np.asarray(times_s, float)) - self.at_s(np.asarray(zero_s))

        requests = []
        for record in recording.requests:
            tokens = undisturbed(record.first_token_s + np.cumsum([0.0, *record.gaps_s]))
            began = record.first_token_s - (record.server_prefill_s or 0.0)
            requests.append(
                replace(
                    record,
                    sent_s=float(undisturbed(record.sent_s)),
                    first_token_s=float(tokens[0]),
                    finished_s=float(tokens[-1]),
                    gaps_s=tuple(np.diff(tokens).tolist()),
                    server_prefill_s=record.server_prefill_s and float(tokens[0] - undisturbed(began)),
                    server_decode_s=record.server_decode_s and float(tokens[-1] - tokens[0]),
                )
            )
        return replace(recording, requests=tuple(requests))
