"""Traces of a few steps, for TensorBoard's profile page: by config.profile, or on SIGUSR1."""

import contextlib
from collections.abc import Callable

import jax


class Profiler:
    """Starts a trace before the first step asked for and ends it after the last.

    Args:
        workdir: the trace goes into plugins/profile there, where TensorBoard looks.
        start: first step to trace; 0: none. steps: steps a trace. log: takes a line for the user.
    """

    def __init__(self, workdir: str, start: int, steps: int, log: Callable[[str], None]):
        self._folder = workdir
        self._start, self._steps, self._log = start, steps, log
        self._last: int | None = None  # last step of the trace that is running

    def before(self, step: int, asked: bool) -> None:
        """Called before a step is dispatched. asked: a trace is wanted from this step on."""
        if self._last is None and (asked or step == self._start):
            self._last = step + self._steps - 1
            options = jax.profiler.ProfileOptions()
            # JAX's own name is the second: two traces of one second would be one folder, and those
            # of several processes, which belong together, would not.
            options.session_id = f"step_{step:08d}"
            jax.profiler.start_trace(self._folder, profiler_options=options)

    def named(self, step: int) -> contextlib.AbstractContextManager:
        """What is dispatched inside appears in a trace as this step, for the page's step times."""
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def ends_with(self, step: int) -> bool:
        """Whether this step is the trace's last: the loop then waits for it and calls `stop`."""
        return self._last is not None and step >= self._last

    def stop(self) -> None:
        """Ends a trace that is running and says where it is."""
        if self._last is not None:
            jax.profiler.stop_trace()
            self._log(f"profile of {self._steps} steps: {self._folder}/plugins/profile")
            self._last = None
