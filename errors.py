"""The kinds of errors that end a run with one line on stderr; each has its exit code.

Any package may raise them. Any other exception is a bug, or a library failure that has no one-line
message yet; it ends the run with a traceback.
"""


class TrainerError(Exception):
    """The message is one line: what was given or happened, what is needed, what to try."""

    exit_code = 1


class UserError(TrainerError, ValueError):
    """The user's input cannot work: an option, a flag, the environment or the data."""

    exit_code = 2


class RunError(TrainerError):
    """The run failed: files, devices, memory, another process, or the training itself."""

    exit_code = 1


class DataError(RunError):
    """Documents can no longer be read: a file has changed, or a worker process has died.

    The training state is intact, so the last step can be saved.
    """
