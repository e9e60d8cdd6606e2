"""What was measured so far, on disk: an interrupted profile goes on where it stopped.

Each measurement is a line of JSON, appended as soon as it is known. An incomplete line, which an interruption
has left, is ignored. So are lines with another key: those of another model, device or number of threads.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from dflop.profiling.timer import Timing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def key_of(facts: Mapping[str, Any]) -> str:
    """Key of the model and the device that are measured.

    Args:
        facts: all facts that must be equal for two measurements to be comparable.

    Returns:
        16 hexadecimal digits.
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


class Records:
    """Measurements by case, in memory and, where there is a path, in its file."""

    def __init__(self, path: Path | None, key: str) -> None:
        """Reads what the file already has under `key`.

        Args:
            path: the file; None keeps nothing.
            key: see `key_of`.

        Raises:
            OSError: the file can be neither read nor made.
        """
        self._path = path
        self._key = key
        self.timings: defaultdict[str, list[Timing]] = defaultdict(list)
        self.numbers: dict[str, int] = {}
        self.facts: dict[str, Any] = {}
        self.spent_ns = 0
        """Time that all these measurements took, in nanoseconds."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._read(path)

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        text = path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            try:
                record = json.loads(line)
                if record["key"] == self._key:
                    self._take(record)
            except (ValueError, KeyError, TypeError):
                continue
        if text and not text.endswith("\n"):
            # Ends an incomplete last line, so that the next line does not become part of it.
            self._append("")

    def _take(self, record: Mapping[str, Any]) -> None:
        if "number" in record:
            self.numbers[record["case"]] = int(record["number"])
        elif "fact" in record:
            self.facts[record["case"]] = record["fact"]
        else:
            timing = Timing(tuple(int(phase) for phase in record["phases_ns"]))
            self.timings[record["case"]].append(timing)
            self.spent_ns += timing.total_ns

    def _append(self, line: str) -> None:
        if self._path is not None:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
            except OSError as error:
                # The error of a failed write, as on a full disk, does not name the file.
                raise OSError(error.errno, error.strerror, str(self._path)) from error

    def add_timing(self, case: str, timing: Timing) -> None:
        """Keeps one run.

        Args:
            case: what was run.
            timing: how long it took.
        """
        record = {"key": self._key, "case": case, "phases_ns": list(timing.phases_ns)}
        self._take(record)
        self._append(json.dumps(record))

    def add_number(self, case: str, number: int) -> None:
        """Keeps one number that is measured only once; a later one replaces it.

        Args:
            case: name of the number.
            number: the number.
        """
        record = {"key": self._key, "case": case, "number": number}
        self._take(record)
        self._append(json.dumps(record))

    def add_fact(self, case: str, fact: Any) -> None:
        """Keeps a fact that is not a number; a later one replaces it.

        Args:
            case: name of the fact.
            fact: anything that JSON can hold.
        """
        record = {"key": self._key, "case": case, "fact": fact}
        self._take(record)
        self._append(json.dumps(record))
