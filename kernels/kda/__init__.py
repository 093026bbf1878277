"""Kimi Delta Attention. The interface is `kda`; `kda_on_rank` is for loops over layers with a
hand-written gradient."""

from kernels.kda.api import kda, kda_on_rank

__all__ = ["kda", "kda_on_rank"]
