"""What tests of the command share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).parents[2] / "benches"


@pytest.fixture(scope="session")
def kills():
    """`benches/kills.py`: how it finds ranks, and how it counts samples."""
    sys.path.insert(0, str(BENCHES))
    spec = importlib.util.spec_from_file_location("bench_kills", BENCHES / "kills.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(BENCHES))
    return module
