"""Causal attention inside segments: `attention` is the contract, `reference` the definition."""

from kernels.attention.api import IMPLEMENTATIONS, Memory, attention
from kernels.attention.reference import attention_reference

__all__ = ["IMPLEMENTATIONS", "Memory", "attention", "attention_reference"]
