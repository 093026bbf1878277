"""Kimi Delta Attention. The interface is `kda`."""

from kernels.kda.api import kda

__all__ = ["kda"]
