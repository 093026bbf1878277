"""The tests' tolerances, each with its reason. Relative errors are RMS(x - ref) / RMS(ref).
Those that the check on a TPU also uses are in kernels/accuracy.py."""

# The whole model in float32 against another order of the same sums (other ranks, chunks, packing,
# windows) or against float64: a few float32 roundings (6e-8 each) through a handful of layers.
MODEL_FLOAT32 = 1e-5
# Random numbers drawn on different meshes: the same bits, up to a few roundings of the inverse
# error function, whose order of operations depends on the shape of the loop.
INITIAL_VALUES = 1e-6
# Gradients go through twice as many operations, and small leaves (a_log, dt_bias) are sums that
# cancel: 1.4e-6 observed.
MODEL_FLOAT32_GRADIENT = 1e-5
# The whole model with bf16 products, residual stream and convolution inputs against float32.
BFLOAT16_AGAINST_FLOAT32 = 3e-2
# A slope from five float32 losses of about 4: rounding of 2e-7 each over a step of 0.05.
FINITE_DIFFERENCE = 1e-2
# KDA's float32 path against the recurrence in float64: products at full precision, sums of 64 terms
# and an inverse per tile.
KDA_FLOAT32 = 1e-5
# bf16 operands (2^-9) in every product and a bf16 result, accumulated in float32.
KDA_BFLOAT16 = 5e-3
# Nearly identical keys with beta = 1: the new value is a small difference of rounded ones.
KDA_BFLOAT16_NEAR_KEYS = 3e-2

# "chunked" computes bf16 inputs in float32; only results are rounded, by 2^-9 at most (RMS 1.7e-3),
# gradients once more where those of tiles with given states are added.
KDA_BOUNDS_ROUNDED = {"out": 2e-3, "gradient": 4e-3, "decay": 4e-3}
# Identical keys, beta = 1, no decay: each new value is the difference of two rounded ones, so their
# rounding errors remain although the values cancel.
KDA_BOUNDS_NEAR_KEYS = {"out": 3e-2, "gradient": 3e-2, "decay": 3e-2}
# The same sums in the same order, compiled for other shapes: a rounding or two differ.
KDA_SAME_ORDER = 5e-7
# The recurrence in float32, called through the interface: the same formulas in the same order.
KDA_BOUNDS_RECURRENT = {"out": 5e-6, "gradient": 1e-5, "decay": 1e-5}
# A run that continued on another mesh: float32 sums in another order, over ten training steps.
RESUMED_ON_ANOTHER_MESH = 1e-4
