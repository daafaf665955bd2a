"""Baton: disaggregated LLM inference on stock vLLM.

A folder is a room with one door: its ``__init__`` names what other rooms may use.
"""

__version__ = "0.1.0"
