"""Callsieve: a language model teaches itself when a tool helps (Toolformer, end to end)."""

__version__ = "0.1.0"
