"""The file of a run: a header and one line a request, each written whole, so that a killed run can go on."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from agentjax.errors import complaint, shown
from agentjax.readers.native import read_native
from agentjax.records import Recording, RequestRecord, to_json, with_cache_misses

_BEGINNING = b'{"agentjax_bench": 1,'


OF_FAULTS = ("timeout_s", "stall_timeout_s", "max_attempts", "backoff_s", "longest_wait_s", "api_key_env")
"""Settings that a resumed run may change: it may be why it is resumed."""


class RecordLog:
    """Records of a run, in memory and, with a path, in a file.

    Attributes:
        about: the header, once there is one.
        records: in the order in which the requests ended; those of an earlier, unfinished run first.
    """

    def __init__(self, path: str | Path | None, resume: bool = False) -> None:
        """Reads what an earlier run has left, if this one resumes it.

        Raises:
            InputError: the file is there and is not to be resumed, or is not that of a benchmark.
        """
        self.about: dict[str, Any] = {}
        self.records: list[RequestRecord] = []
        self._path = None if path is None else Path(path)
        self._file: int | None = None
        self._names: Counter[str] = Counter()
        self._done: set[str] = set()
        self._whole_bytes = 0
        self._lacks_end = False
        if self._path is None or not self._path.exists():
            return
        if not resume:
            raise complaint(f"out={self._path}", "a file", "a new name, or resume=true to go on with it")
        self._read(self._path)

    @property
    def started(self) -> datetime | None:
        """When the run that is resumed was started.

        Raises:
            InputError: its header does not say.
        """
        if not self.about:
            return None
        text = self.about.get("started")
        try:
            started = datetime.fromisoformat(text or "")
        except (TypeError, ValueError):
            started = None
        if started is None or started.tzinfo is None:
            raise complaint(f"{self._path}, line 1, started", shown(text), "a date and time with its zone")
        return started

    @property
    def ended_s(self) -> float:
        """When the last request of a run that is resumed ended."""
        return max((record.finished_s or record.sent_s for record in self.records), default=0.0)

    def check(self, about: Mapping[str, Any]) -> None:
        """Refuses to resume a run with other settings than how faults are handled.

        Raises:
            InputError: names the first key that differs.
        """
        mine = {"mode": about["mode"], **about["config"]}
        earlier = {"mode": self.about.get("mode"), **self.about.get("config", {})}
        for key in [*mine, *earlier]:
            if key not in OF_FAULTS and mine.get(key) != earlier.get(key):
                found, expected = (json.dumps(side.get(key)) for side in (mine, earlier))
                raise complaint(key, found, f"{expected} as in {self._path}, which is to be resumed")

    def is_done(self, name: str) -> bool:
        """The request has been measured without a fault."""
        return name in self._done

    def new_name(self, name: str) -> str:
        """The name for another attempt to measure a request: with `~2`, `~3`, ... if there was one before."""
        count = self._names[name] + 1
        return name if count == 1 else f"{name}~{count}"

    def open(self, about: Mapping[str, Any]) -> None:
        """Begins to write: the header of a new run, or after the last whole line of the one before."""
        is_new = not self.about
        self.about = self.about or dict(about)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._file, self._whole_bytes)
            if self._lacks_end:
                os.write(self._file, b"\n")
        if is_new:
            self._write(self.about)

    def append(self, record: RequestRecord) -> None:
        """Keeps a record, and writes its line."""
        self._keep(record)
        self._write(to_json(record))

    def recording(self) -> Recording:
        """All records, in the order in which their requests were sent."""
        ordered = sorted(self.records, key=lambda record: record.sent_s)
        return Recording(with_cache_misses(ordered), dict(self.about))

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _keep(self, record: RequestRecord) -> None:
        name = record.request.partition("~")[0]
        self.records.append(record)
        self._names[name] += 1
        if record.error is None:
            self._done.add(name)

    def _write(self, content: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        line = (json.dumps(content) + "\n").encode()
        while line:
            line = line[os.write(self._file, line) :]

    def _read(self, path: Path) -> None:
        """Reads an earlier run; a last line that was cut off is dropped."""
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            raise complaint(f"out={path}", "a gzip file", "the unpacked file, to go on with it")
        self._whole_bytes = content.rfind(b"\n") + 1
        if not self._whole_bytes and _BEGINNING.startswith(content[: len(_BEGINNING)]):
            return  # cut off within its header: a new run
        recording = read_native(path)
        for record in recording.requests:
            self._keep(record)
        self.about = recording.about
        try:
            json.loads(content[self._whole_bytes :])
        except ValueError:
            return
        self._whole_bytes = len(content)
        self._lacks_end = True
