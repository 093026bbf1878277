"""The tests' tolerances, each with its reason. Relative errors are RMS(x - ref) / RMS(ref)."""

# The whole model in float32 against another order of the same sums (other ranks, chunks, packing,
# windows) or against float64: a few float32 roundings (6e-8 each) through a handful of layers.
MODEL_FLOAT32 = 1e-5
# Random numbers drawn on different meshes: the same bits, with a few roundings of the inverse error
# function, which each shape of loop computes in its own order.
INITIAL_VALUES = 1e-6
# Gradients take twice the way; small leaves (a_log, dt_bias) are sums that cancel.
MODEL_FLOAT32_GRADIENT = 2e-5
# Attention with bf16 inputs and products: a rounding of 2^-9 on queries, keys, values and weights.
ATTENTION_BFLOAT16 = 1e-2
# The whole model with bf16 products, residual stream and convolution inputs against float32.
BFLOAT16_AGAINST_FLOAT32 = 3e-2
# A slope from five float32 losses of about 4: rounding of 2e-7 each over a step of 0.05.
FINITE_DIFFERENCE = 1e-2
