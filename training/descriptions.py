"""The meaning of each logged name, for TensorBoard and docs/metrics.md.

A value is the mean over the steps since the last report (config.log.every), unless its name ends in
`seen`, `skipped` or `last` (the value at the step; totals of the run) or `max`.
"""

import re

DESCRIPTIONS = {
    "learning/loss": "Mean over the tokens that the loss counts, nats per token.",
    "learning/accuracy": "Fraction of the tokens that the loss counts whose logit is the highest.",
    "learning/bits_per_byte": "Bits per byte of the text that the tokens represent.",
    "learning/z_loss": "Mean of log(sum(exp(logits)))^2; only with config.train.z_loss.",
    "learning/grad_norm": "Global norm of the gradient before clipping.",
    "learning/learning_rate": "Learning rate of the update.",
    "learning/steps_skipped": "Steps of the run whose update was skipped.",
    "learning/tokens_seen": "Real tokens trained on, restarts included.",
    "learning/epoch": "Passes over the training documents so far.",
    "data/epoch_N": "Passes over the documents of source N of config.data.mixture, from 0.",
    "data/share_N": "Fraction of the tokens so far that come from source N of config.data.mixture.",
    "eval/loss": "Mean over the validation tokens that the loss counts, nats per token.",
    "eval/accuracy": "Fraction of these tokens whose logit is the highest.",
    "eval/bits_per_byte": "Bits per byte of the validation text.",
    "eval/seconds": "Wall time of the evaluation without compilation.",
    "perf/step_time_seconds": "Wall time per step; compilation, evaluation and saving excluded.",
    "perf/tokens_per_second": "Real tokens per second, all devices and processes.",
    "perf/tokens_per_second_per_device": "Real tokens per second and device.",
    "perf/padded_tokens_per_second": "Tokens per second, padding included.",
    "perf/data_wait_seconds": "Time per step that process 0 waits for a batch.",
    "perf/tflops_per_second_per_device": "Model TFLOP/s of real tokens per device.",
    "perf/mfu": "Share of the device's peak FLOP/s; only if the peak is known.",
    "memory/host_rss_bytes": "Resident memory of process 0.",
    "memory/compiled_peak_bytes": "Bytes per device that the compiled step needs.",
    "memory/peak_bytes_per_device": "Peak memory use of any device so far; only on TPU and GPU.",
    "goodput/training_seconds": "Time in steps; all goodput times include earlier starts.",
    "goodput/compilation_seconds": "Time compiling.",
    "goodput/data_seconds": "Time waiting for data.",
    "goodput/checkpoint_seconds": "Time in which saving blocked training.",
    "goodput/evaluation_seconds": "Time evaluating.",
    "goodput/restart_seconds": "Time starting, and time of steps lost by a restart.",
    "goodput/productive_share": "Training time divided by total time.",
}


def describe(name: str) -> str:
    """The description of a logged name, "" for names that layers report."""
    return DESCRIPTIONS.get(re.sub(r"^(data/.*_)\d+$", r"\1N", name), "")
