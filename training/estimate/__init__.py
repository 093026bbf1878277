"""Estimates of a training step for a TPU that is absent: memory, work, communication, waiting."""
