"""One-line messages for library and system failures whose cause is known."""

import errno
import os
import sys

from errors import RunError, TrainerError
from training import peers, process

# Errors of writing to an open file; they do not contain its name.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def explain(error: Exception) -> TrainerError | None:
    """Converts an error to a TrainerError; None if its cause is not known."""
    if isinstance(error, TrainerError):
        if "jax" in sys.modules and _from_xla(error):
            peers.wait_for_cause()  # a save, or a look at a folder, that another process left
        return error
    if isinstance(error, BrokenPipeError):
        return _reader_closed()
    if isinstance(error, OSError) and (error.filename or error.errno in DISK):
        where = error.filename or "--workdir"
        return RunError(
            f"{where}: {error.strerror}; the steps saved before are untouched; "
            "try freeing space, or another --workdir"
        )
    return _of_xla(error) if "jax" in sys.modules else None


def _reader_closed() -> RunError:
    # Discard the remaining output; otherwise the interpreter would report the error again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return RunError(
        "stdout: the reader closed the pipe; the steps saved before are untouched; "
        "the same command resumes, try it with > log.txt"
    )


def _from_xla(error: BaseException | None) -> bool:
    """Whether a failed collective led to the error."""
    import jax

    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _of_xla(error: Exception) -> RunError | None:
    import jax

    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    line = _first_line(str(error))
    if _out_of_memory(str(error)):
        return RunError(
            f"a device's memory is too small ({line}); try config.train.grad_accum_steps, "
            "config.model.remat=full, a smaller config.data.global_batch_size, or a larger "
            "config.mesh.fsdp or config.mesh.context"
        )
    if jax.process_count() > 1:
        peers.wait_for_cause()
        return RunError(
            f"process {jax.process_index()}: a step failed, probably because another process has "
            f"died ({line}); {process.resume_hint()}"
        )
    return None


def _out_of_memory(text: str) -> bool:
    """Whether an XLA failure is about memory; there are two forms of the message."""
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:200] if lines else ""
