"""Values by key within a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

Key = TypeVar("Key", bound="Hashable")
Kept = TypeVar("Kept")


class ByteBoundedCache(Generic[Key, Kept]):
    """Values by key, the least recently used out when their bytes exceed the bound; for any thread."""

    def __init__(self, bound_bytes: int) -> None:
        """Empty.

        Args:
            bound_bytes: Bytes of all values together; a larger value is not kept.
        """
        self._bound_bytes = bound_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, tuple[Kept, int]] = OrderedDict()
        self.num_bytes = 0

    def __contains__(self, key: Key) -> bool:
        """Whether the value is kept; does not count as a use."""
        return key in self._entries

    def keeps(self, num_bytes: int) -> bool:
        """Whether a value of so many bytes would be kept."""
        return num_bytes <= self._bound_bytes

    def get(self, key: Key) -> Kept | None:
        """The value, now the most recently used; none if it is not kept."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Key, value: Kept, num_bytes: int) -> None:
        """Keeps the value if it fits the bound at all, and throws out what no longer fits."""
        with self._lock:
            if not self.keeps(num_bytes) or key in self._entries:
                return
            self._entries[key] = (value, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self._bound_bytes:
                _, (_, oldest_bytes) = self._entries.popitem(last=False)
                self.num_bytes -= oldest_bytes
