"""The folder of a run's checkpoints: a local folder, or a folder in a bucket."""

import re
import time

import fsspec
import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from checkpoints.errors import CheckpointError

# Orbax passes whole paths to glob; TensorStore writes the contents of a\\b to a/b.
# Bucket paths are read as URLs.
_MISREAD = re.compile(r"[*?[\\]")
_MISREAD_IN_BUCKETS = re.compile(r"[*?[\\#\x00-\x1f\x7f]")


def find(directory: str) -> epath.Path:
    """Returns the folder as a path for Orbax.

    Raises:
        CheckpointError: it is neither a local path nor one in a bucket, or its name is one that
            Orbax or TensorStore would misread.
    """
    scheme, separator, rest = directory.partition("://")
    if separator and (scheme != "gs" or rest[:1] in ("", "/")):
        raise CheckpointError(f"{directory}: needs a local path or gs://bucket/path; try one")
    _check_name(directory)
    # gcsfs would cache folder listings and miss what TensorStore and other processes write.
    fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False
    return epath.Path(directory)


def _check_name(directory: str) -> None:
    advice = "try another --workdir or config.checkpoint.directory"
    misread = _MISREAD_IN_BUCKETS if "://" in directory else _MISREAD
    if found := misread.search(directory):
        raise CheckpointError(
            f"{directory}: contains {found[0]!r}, which Orbax or TensorStore misread, so that "
            f"checkpoints saved there could not be restored; {advice}"
        )
    try:
        directory.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{directory!r}: not valid UTF-8, so that arrays cannot be saved there; {advice}"
        ) from None


def make(path: epath.Path) -> None:
    """Creates the folder. A folder in a bucket exists as long as it contains an object."""
    if not str(path).startswith("gs://"):
        path.mkdir(parents=True, exist_ok=True)
    elif jax.process_index() == 0:
        try:
            (path / ".folder").write_text("")
        except FileNotFoundError:
            raise CheckpointError(f"{path}: there is no such bucket; try creating it") from None


def try_writing(path: epath.Path) -> None:
    """Checks that a file can be written and deleted; retention needs to delete."""
    probe = path / ".writable"
    probe.write_text("")
    probe.unlink()


def check_shared(path: epath.Path) -> None:
    """Checks that all processes see process 0's folder; all processes call it together.

    Raises:
        CheckpointError: a process does not see it. The first save would wait ten minutes, then
            fail.
    """
    token = str(multihost_utils.broadcast_one_to_all(np.int32(time.time_ns() % 2**31)))
    mark = path / ".shared"
    if jax.process_index() == 0:
        mark.write_text(token)
    multihost_utils.sync_global_devices("checkpoint folder marked")
    sees = mark.exists() and mark.read_text() == token
    blind = np.flatnonzero(~multihost_utils.process_allgather(np.array(sees)).reshape(-1))
    if jax.process_index() == 0:
        mark.unlink()
    if len(blind):
        raise CheckpointError(
            f"{path}: process {blind[0]} does not see the folder of process 0; needs one that all "
            "hosts reach; try --workdir on a network folder, or "
            "config.checkpoint.directory=gs://bucket/path"
        )
