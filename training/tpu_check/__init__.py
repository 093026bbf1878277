"""`make tpu-check`: kernels, memory and estimates, checked on a TPU.

`driver` runs the checks of `checks` one by one in a `worker` process; `table` formats the results.
"""
