"""Bounds on kernel errors: RMS(x - ref) / RMS(ref) against float64 definitions.

Tests check them in the interpreter, `make tpu-check` on a TPU.
"""

# KDA against the float64 recurrence. float32: a few roundings in sums of 64 products, states and
# running products; gradients go through about twice as many operations.
KDA_BOUNDS_FLOAT32 = {"out": 1e-5, "gradient": 5e-5, "decay": 5e-5}
# bf16 inputs: every operand of a product and the result are rounded by up to 2^-9. The decay's
# gradient is a running sum of differences of such products.
KDA_BOUNDS_BFLOAT16 = {"out": 5e-3, "gradient": 1e-2, "decay": 1.5e-2}
# Short convolution in float32 against float64 sums of W products and a sigmoid.
CONVOLUTION_FLOAT32 = 1e-6
# The same with bfloat16 results: one rounding, at most 2^-9 of a number, 1.7e-3 RMS.
CONVOLUTION_BFLOAT16 = 2.5e-3
# Attention with bf16 inputs and products: a rounding of 2^-9 on queries, keys, values and weights.
ATTENTION_BFLOAT16 = 1e-2
