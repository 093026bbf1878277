"""Continues rows of tokens: chunked prefill, then one token at a time from the carried state.

There is no second implementation of the model. Both phases call `model.decoder.forward`; for single
tokens KDA uses the recurrence instead of the chunked form. The carry holds everything that the next
token needs. For a KDA layer this is its state and the convolution's last inputs, so the time and
memory of a token do not depend on what came before it. For an attention layer it is a fixed number
of the last keys and values.

Axes: B row, T token, V vocabulary entry.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.config import ModelConfig
from model.decoder import Arrays, carry_shardings, forward, init_carry
from model.loss import logits
from model.mixers.registry import reads_positions


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from its logits.

    Attributes:
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: sample only from the k most likely tokens; 0: from all.
        top_p: sample only from the smallest set of most likely tokens whose total probability
            reaches p; 0 < p <= 1.

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
    """The state of a batch of rows: the carry after its last tokens, and the next logits.

    logits: [B, V] float32 of the token after each row's last one. length: [B] int32, tokens so far.
    """

    carry: Arrays
    logits: jax.Array
    length: jax.Array


class Generator:
    """Generates from one set of parameters.

    Args:
        params: as `forward` takes them.
        cfg: the trained model's; its carry and rematerialisation options are ignored.
        mesh: data, fsdp and context must be 1, since rows are not split; tensor may split heads.
        piece: tokens of a prompt that are processed at a time. Memory grows with it.
        attention_memory: tokens that attention layers see before a piece or a new token, or
            cfg.attention_memory if that is larger.
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
        self._positions = reads_positions(self._cfg)
        # A chunk of KDA would hold one token, so the recurrence is cheaper.
        token_by_token = dataclasses.replace(self._cfg, kda_implementation="recurrent")
        whole = NamedSharding(mesh, PartitionSpec())
        carried = carry_shardings(self._cfg, mesh)
        self._shardings = Decoded(carried, whole, whole)  # type: ignore[arg-type]
        self._advance = self._jit(functools.partial(self._forward, self._cfg))
        self._append = self._jit(functools.partial(self._forward, token_by_token))
        self._next = jax.jit(
            functools.partial(self._sample_and_append, token_by_token),
            static_argnums=4,
            donate_argnums=1,
            out_shardings=(self._shardings, whole),
        )

    def prefill(self, prompts: Sequence[np.ndarray]) -> Decoded:
        """Processes prompts, each [n] int32 with n >= 1, of different lengths, from an empty state.

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
            done = self._advance(self._params, done, *arrays)
        return done

    def append(self, done: Decoded, tokens: jax.Array) -> Decoded:
        """Appends one token per row: tokens [B] int32. `done` is donated."""
        return self._append(self._params, done, *_single(tokens))

    def next(
        self, done: Decoded, number: int, sampling: Sampling, key: jax.Array
    ) -> tuple[Decoded, jax.Array]:
        """Draws the number-th new token of every row, [B] int32, and appends it. `done` is
        donated."""
        return self._next(self._params, done, np.int32(number), key, sampling)

    def tokens(
        self, done: Decoded, limit: int, sampling: Sampling, seed: int
    ) -> Iterator[np.ndarray]:
        """Yields the next token of every row, [B] int32, `limit` times. `done` is donated.

        The host reads a token only after the next step has been dispatched, so the device does not
        wait for the reader.
        """
        key = jax.random.key(seed)
        done, token = self.next(done, 0, sampling, key)
        for number in range(1, limit):
            before = token
            done, token = self.next(done, number, sampling, key)
            yield np.asarray(before)
        yield np.asarray(token)

    def step_bytes(self, rows: int) -> int:
        """Bytes that one token of `rows` rows needs on the device in addition to the parameters:
        the compiled step's arguments, results and temporaries."""
        done = jax.eval_shape(self._empty_arrays(rows))
        key = jax.eval_shape(lambda: jax.random.key(0))
        arrays = self._params, done, jax.ShapeDtypeStruct((), np.int32), key
        sizes = self._next.lower(*arrays, Sampling()).compile().memory_analysis()
        assert sizes is not None, "every supported backend reports memory"
        held = sum(x.nbytes for x in jax.tree.leaves(self._params))
        beside = sizes.argument_size_in_bytes - held
        return (
            beside
            + sizes.output_size_in_bytes
            - sizes.alias_size_in_bytes
            + (sizes.temp_size_in_bytes)
        )

    def _jit(self, advance: Callable[..., Decoded]) -> Callable[..., Decoded]:
        return jax.jit(advance, donate_argnums=1, out_shardings=self._shardings)

    def _empty(self, rows: int) -> Decoded:
        return jax.jit(self._empty_arrays(rows), out_shardings=self._shardings)()

    def _empty_arrays(self, rows: int) -> Callable[[], Decoded]:
        def make() -> Decoded:
            scores = jnp.zeros((rows, self._cfg.vocab_size), jnp.float32)
            return Decoded(init_carry(self._cfg, rows), scores, jnp.zeros(rows, jnp.int32))

        return make

    def _sample_and_append(self, cfg, params, done: Decoded, number, key, sampling: Sampling):
        token = sample(done.logits, jax.random.fold_in(key, number), sampling)
        return self._forward(cfg, params, done, *_single(token)), token

    def _forward(self, cfg, params, done: Decoded, tokens, segment_ids, continues) -> Decoded:
        """tokens, segment_ids: [B, T], with padding (0) only at the end. A row that is all padding
        keeps its state."""
        positions = done.length[:, None] + jnp.arange(tokens.shape[1]) if self._positions else None
        arrays = tokens, segment_ids, continues
        hidden, carry, _ = forward(params, cfg, *arrays, done.carry, self._mesh, positions)
        count = jnp.sum(segment_ids != 0, axis=1)
        last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        scores = logits(params, cfg, last, self._mesh)[:, 0]
        scores = jnp.where(count[:, None] > 0, scores, done.logits)
        return Decoded(carry, scores, done.length + count)


def _single(tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """tokens, segment_ids and continues of one token per row."""
    return tokens[:, None], jnp.ones((len(tokens), 1), jnp.int32), jnp.ones(len(tokens), bool)


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
