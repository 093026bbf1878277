"""The kinds of errors that end a run with one line on stderr; each has its exit code.

Any package may raise them. Any other exception is a bug, or a failure of a library that nobody has
given a line yet: it ends with its traceback.
"""


class TrainerError(Exception):
    """Its text is one line: what was given or happened, what is needed, what to try."""

    exit_code = 1


class UserError(TrainerError, ValueError):
    """Something given cannot work: an option, a flag, the environment or the data."""

    exit_code = 2


class RunError(TrainerError):
    """The run failed: files, devices, memory, another process, or the training itself."""

    exit_code = 1


class DataError(RunError):
    """Documents can no longer be read: a file has changed, or a process that reads has died.

    The state of the training is whole, so the last step can be saved.
    """
