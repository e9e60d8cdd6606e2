"""What all tests share: the Python sources first on the path, and one thread a process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_TESTS = Path(__file__).parent
# The tree's own package, as `make setup` builds the native module into it; and what tests lend each other.
for folder in (_TESTS.parent / "python", _TESTS / "unit", _TESTS / "dist"):
    sys.path.insert(0, str(folder))

# Before torch is imported anywhere: two ranks with two threads each would fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
