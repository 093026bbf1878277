"""Causal depthwise convolution that stops at segment boundaries. The interface is `short_conv`."""

from kernels.short_conv.api import short_conv, split_heads

__all__ = ["short_conv", "split_heads"]
