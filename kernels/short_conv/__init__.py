"""Causal depthwise convolution that stops at segment boundaries. The interface is `short_conv`;
`short_conv_on_rank` is for loops over layers with a hand-written gradient."""

from kernels.short_conv.api import short_conv, short_conv_on_rank, split_heads

__all__ = ["short_conv", "short_conv_on_rank", "split_heads"]
