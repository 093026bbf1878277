"""A small scheduled HLO text, in the form of the TPU compiler's, with known numbers.

A loop over three layers. The body saves the hidden state into a stack, takes a slice of the stacked
weights, sums it over fsdp x context (synchronous) and gathers it over context (asynchronous, with a
kernel in between).
"""

import pathlib

LAYERS = 3
TEXT = pathlib.Path(__file__).with_name("step.hlo.txt").read_text()

# As the compiler writes them: equal kernels once.
BUNDLES = {"product.1": 500, "layer.1": 20, "saved.1": 10, "copied": 7}
