"""Traces of a few steps, for TensorBoard's profile page: by config.profile, or on SIGUSR1."""

import contextlib
from collections.abc import Callable

import jax


class Profiler:
    """Starts a trace before its first step and ends it after the last one.

    Args:
        workdir: the trace is written to plugins/profile in it, where TensorBoard looks.
        start: first step to trace; 0: none. steps: steps per trace. log: called with a line for the
            user.
    """

    def __init__(self, workdir: str, start: int, steps: int, log: Callable[[str], None]):
        self._folder = workdir
        self._start, self._steps, self._log = start, steps, log
        self._last: int | None = None  # last step of the current trace

    def before(self, step: int, asked: bool) -> None:
        """Called before a step is dispatched. asked: whether a trace shall start with this step."""
        if self._last is None and (asked or step == self._start):
            self._last = step + self._steps - 1
            options = jax.profiler.ProfileOptions()
            # By default JAX names the folder by the time in seconds: two traces in one second would
            # share a folder, and the traces of several processes, which belong together, might not.
            options.session_id = f"step_{step:08d}"
            jax.profiler.start_trace(self._folder, profiler_options=options)

    def named(self, step: int) -> contextlib.AbstractContextManager:
        """Marks what is dispatched inside as this step, for step times in the profile."""
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def ends_with(self, step: int) -> bool:
        """Whether this is the trace's last step; the loop then waits for it and calls `stop`."""
        return self._last is not None and step >= self._last

    def stop(self) -> None:
        """Ends the current trace, if any, and logs its folder."""
        if self._last is not None:
            jax.profiler.stop_trace()
            self._log(f"profile of {self._steps} steps: {self._folder}/plugins/profile")
            self._last = None
