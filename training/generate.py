"""Text from a model: loads parameters and tokenizer, and streams continuations."""

import dataclasses
import os
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from data.text_stream import TextStream
from data.tokenizer import Tokenizer, make_tokenizer
from errors import UserError
from model.axes import TENSOR, Arrays
from model.checks import check_mesh
from model.config import ModelConfig
from model.generate import Generator, Sampling
from training.mesh import arrange
from training.restore import load_params
from training.weights import read_folder


@dataclasses.dataclass(frozen=True)
class Source:
    """The source of a model: either the `workdir` of a run or `weights`, a Hugging Face folder.

    tokenizer: overrides the run's, or the tokenizer.json in the folder.
    compute_dtype: overrides the run's, or bfloat16 for a folder.
    """

    workdir: str | None = None
    weights: str | None = None
    tokenizer: str | None = None
    compute_dtype: str | None = None


@dataclasses.dataclass
class Session:
    """A loaded model. `tokens` counts what was generated."""

    generator: Generator
    tokenizer: Tokenizer
    tokens: int = 0

    def stream(
        self, prompts: Sequence[bytes], limit: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[int, str]]:
        """Yields (row, text) as text is generated; a row ends at the end of the document or after
        `limit` tokens.

        Raises:
            UserError: the limit or the seed is out of range.
        """
        if limit < 1:
            raise UserError(f"--max_tokens={limit}: needs a whole number >= 1; try 256")
        if not 0 <= seed < 2**31:
            raise UserError(f"--seed={seed}: needs a whole number >= 0; try 0")
        rows = [self._encode(prompt) for prompt in prompts]
        streams = [TextStream(self.tokenizer, row[1:].tolist()) for row in rows]
        active = set(range(len(rows)))
        for tokens in self.generator.tokens(self.generator.prefill(rows), limit, sampling, seed):
            for row in sorted(active):
                if tokens[row] == self.tokenizer.eos_id:
                    active.remove(row)
                else:
                    self.tokens += 1
                    yield row, streams[row].push(int(tokens[row]))
            if not active:
                break
        for row, stream in enumerate(streams):
            yield row, stream.flush()

    def speed(self, seconds: float) -> str:
        """One line about the tokens generated so far."""
        return f"{self.tokens} tokens in {seconds:.1f} s, {self.tokens / seconds:.1f} tokens/s"

    def _encode(self, text: bytes) -> np.ndarray:
        """Ids of the beginning of a document with this text."""
        ids, _ = self.tokenizer.encode(text)
        return np.concatenate([[self.tokenizer.bos_id], ids]).astype(np.int32)


def open_session(source: Source, tensor: int, attention_memory: int) -> Session:
    """Loads a model over `tensor` devices. attention_memory: see `Generator`.

    Raises:
        UserError: there is no such model or tokenizer, or the heads are not divisible.
    """
    mesh = arrange({TENSOR: tensor}, jax.devices()[:tensor])
    params, model, tokenizer = _load(source, mesh)
    check_mesh(model, mesh.shape)
    if tokenizer.vocab_size != model.vocab_size:
        raise UserError(
            f"--tokenizer={tokenizer.name}: has {tokenizer.vocab_size} ids, the model "
            f"{model.vocab_size}; try the tokenizer that it was trained with"
        )
    generator = Generator(params, model, mesh, attention_memory=attention_memory)
    return Session(generator, tokenizer)


def sampling(temperature: float, top_k: int, top_p: float) -> Sampling:
    """The sampling flags as a record; raises UserError if one is out of range."""
    try:
        return Sampling(temperature, top_k, top_p)
    except ValueError as error:
        raise UserError(f"--{error}") from None


def read_prompts(texts: Sequence[str], file: str | None) -> list[bytes]:
    """The prompts of the flags, or one empty prompt, which is the beginning of a document."""
    prompts = [os.fsencode(text) for text in texts]
    if file:
        with open(file, "rb") as opened:
            prompts.append(opened.read())
    return prompts or [b""]


def _load(source: Source, mesh: Mesh) -> tuple[Arrays, ModelConfig, Tokenizer]:
    if source.weights:
        beside = os.path.join(source.weights, "tokenizer.json")
        name = source.tokenizer or (beside if os.path.exists(beside) else "bytes")
        params, model = read_folder(source.weights, mesh)
        return params, _computed_in(model, source.compute_dtype), make_tokenizer(name)
    assert source.workdir is not None
    loaded = load_params(source.workdir, mesh)
    data = loaded.metadata["config"]["data"]
    name = source.tokenizer or data["tokenizer"]
    model = _computed_in(loaded.model, source.compute_dtype)
    return loaded.params, model, make_tokenizer(name, data["bos_token"], data["eos_token"])


def _computed_in(model: ModelConfig, compute_dtype: str | None) -> ModelConfig:
    return dataclasses.replace(model, compute_dtype=compute_dtype or model.compute_dtype)
