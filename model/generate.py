"""Continues rows of tokens: chunked prefill, then one token at a time from the carried state.

There is no second implementation of the model. Both phases call `model.decoder.forward`, whose
carry is all that the next token needs: for a KDA layer its state and the convolution's last inputs,
so a token costs the same time and memory whatever came before it; for an attention layer the last
keys and values, of a fixed number.

Axes: B row, T token, V vocabulary entry.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.config import ModelConfig
from model.decoder import Arrays, carry_shardings, forward, init_carry
from model.loss import logits


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from its logits.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: only the k most likely tokens; 0: all.
        top_p: only the smallest set of most likely tokens whose probabilities add up to p;
            0 < p <= 1.

    Raises:
        ValueError: an attribute is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: needs a number >= 0; try 1.0")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: needs a whole number >= 0; try 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: needs a number > 0 and <= 1; try 1.0")


class Decoded(NamedTuple):
    """Where a batch of rows is: the carry after its last tokens, and what follows them.

    logits: [B, V] float32 of the token after each row's last one.
    """

    carry: Arrays
    logits: jax.Array


class Generator:
    """Generates from one set of parameters.

    Args:
        params: as `forward` takes them. cfg: the trained model's; its own choices of carry and
            rematerialisation do not matter here. mesh: rows are not split, so data, fsdp and
            context are 1; heads may be over tensor.
        piece: tokens of a prompt that are processed at once. Memory grows with it.
        attention_memory: tokens that attention layers see before a piece or a new token;
            cfg.attention_memory where that is more.
    """

    def __init__(
        self,
        params: Arrays,
        cfg: ModelConfig,
        mesh: Mesh,
        piece: int = 512,
        attention_memory: int = 4096,
    ):
        self._params, self._mesh, self._piece = params, mesh, piece
        memory = max(cfg.attention_memory, attention_memory)
        self._cfg = dataclasses.replace(cfg, carry=True, remat="none", attention_memory=memory)
        whole = NamedSharding(mesh, PartitionSpec())
        self._shardings = carry_shardings(self._cfg, mesh), whole
        self._advance = jax.jit(self._forward, donate_argnums=1, out_shardings=self._shardings)
        self._sample = jax.jit(sample, static_argnums=2)

    def prefill(self, prompts: Sequence[np.ndarray]) -> Decoded:
        """Processes prompts, each [n] int32 with n >= 1, of any lengths, from an empty state.

        Raises:
            ValueError: a prompt is empty.
        """
        if not prompts or min(len(prompt) for prompt in prompts) == 0:
            raise ValueError("a prompt needs at least one token; begin with the begin id")
        rows, longest = len(prompts), max(len(prompt) for prompt in prompts)
        piece = min(self._piece, 1 << (longest - 1).bit_length())
        length = -(-longest // piece) * piece
        tokens, real = np.zeros((2, rows, length), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], real[row, : len(prompt)] = prompt, 1
        done = self._empty(rows)
        for begin in range(0, length, piece):
            part = slice(begin, begin + piece)
            continues = np.full(rows, begin > 0)
            arrays = tokens[:, part], real[:, part], continues
            done = Decoded(*self._advance(self._params, done, *arrays))
        return done

    def append(self, done: Decoded, tokens: jax.Array) -> Decoded:
        """One more token a row: tokens [B] int32. `done` is used up."""
        ones = np.ones((len(tokens), 1), np.int32)
        arrays = tokens[:, None], ones, np.ones(len(tokens), bool)
        return Decoded(*self._advance(self._params, done, *arrays))

    def tokens(
        self, prompts: Sequence[np.ndarray], limit: int, sampling: Sampling, seed: int
    ) -> Iterator[np.ndarray]:
        """Yields `limit` times the next token of every row, [B] int32.

        A token is read on the host only after the step that follows it has been dispatched, so the
        device does not wait for the reader.
        """
        done, key = self.prefill(prompts), jax.random.key(seed)
        token = self._sample(done.logits, jax.random.fold_in(key, 0), sampling)
        for number in range(1, limit + 1):
            before = token
            if number < limit:
                done = self.append(done, token)
                token = self._sample(done.logits, jax.random.fold_in(key, number), sampling)
            yield np.asarray(before)

    def _empty(self, rows: int) -> Decoded:
        def make() -> tuple[Arrays, jax.Array]:
            return init_carry(self._cfg, rows), jnp.zeros((rows, self._cfg.vocab_size), jnp.float32)

        return Decoded(*jax.jit(make, out_shardings=self._shardings)())

    def _forward(self, params, done: Decoded, tokens, segment_ids, continues):
        """tokens, segment_ids: [B, T], padding (0) at the end only. A row of padding stays as it
        is."""
        hidden, carry, _ = forward(
            params, self._cfg, tokens, segment_ids, continues, done.carry, self._mesh
        )
        count = jnp.sum(segment_ids != 0, axis=1)
        last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        scores = logits(params, self._cfg, last, self._mesh)[:, 0]
        return carry, jnp.where(count[:, None] > 0, scores, done.logits)


def sample(scores: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Token ids [B] int32 drawn from logits [B, V]."""
    if sampling.temperature == 0:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = jax.lax.top_k(scores, sampling.top_k)[0][:, -1:]
        scores = jnp.where(scores >= least, scores, -jnp.inf)
    if sampling.top_p < 1:
        scores = jnp.where(_nucleus(scores, sampling.top_p), scores, -jnp.inf)
    return jax.random.categorical(key, scores).astype(jnp.int32)


def _nucleus(scores: jax.Array, top_p: float) -> jax.Array:
    """[B, V] bool: the most likely tokens, up to the one that reaches probability top_p."""
    order = jnp.argsort(-scores, axis=-1)
    probabilities = jnp.take_along_axis(jax.nn.softmax(scores, axis=-1), order, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    put = functools.partial(jnp.put_along_axis, axis=-1, inplace=False)
    return put(jnp.zeros_like(scores, bool), order, before < top_p)
