"""Kimi Delta Attention. The interface is `kda`; `kda_on_rank` is for loops over layers that write
out their own gradient."""

from kernels.kda.api import kda, kda_on_rank

__all__ = ["kda", "kda_on_rank"]
