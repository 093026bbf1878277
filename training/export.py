"""A run's newest checkpoint as a Hugging Face folder."""

import os
import shutil

import jax
import ml_dtypes
import numpy as np

from data.tokenizer import make_tokenizer
from errors import UserError
from model.convert.registry import FORMATS
from training.mesh import arrange
from training.restore import stored_params
from training.weights import SpecialTokens, write_folder

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def export(workdir: str, out: str, fmt: str, dtype: str) -> str:
    """Writes the folder `out` and returns a line that describes it.

    Raises:
        UserError: `out` is not empty, or the format cannot express the model.
    """
    if os.path.isdir(out) and os.listdir(out):
        raise UserError(f"--out={out}: needs an empty or new folder; try another")
    stored = stored_params(workdir, arrange({}, jax.devices()[:1]))
    data = stored.metadata["config"]["data"]
    tokenizer = make_tokenizer(data["tokenizer"], data["bos_token"], data["eos_token"])
    special = SpecialTokens(tokenizer.bos_id, tokenizer.eos_id)
    count = write_folder(out, stored.read, stored.model, FORMATS[fmt], special, DTYPES[dtype])
    if data["tokenizer"].endswith((".json", ".model")):
        shutil.copy(data["tokenizer"], os.path.join(out, os.path.basename(data["tokenizer"])))
    return f"step {stored.step} of {stored.directory}: {count} tensors, {dtype}, in {out} ({fmt})"
