"""Imported before torch: where torch is missing, the error says what brings it."""

from importlib.util import find_spec

if find_spec("torch") is None:
    message = "`torch` is not installed, which this part of dflop needs: pip install 'dflop[train]'"
    raise ModuleNotFoundError(message, name="torch")
