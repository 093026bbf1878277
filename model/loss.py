"""Cross entropy from hidden states, as sums, with logits of a few tokens at a time.

The results are sums, not means: the trainer adds them over windows and divides once by the global
weight, so that every token has equal weight whatever the rows, ranks and accumulation steps.

Axes: T token (n: in a chunk), D residual width, V vocabulary entry (the rank's part).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from model.axes import TENSOR, TOKEN_SPEC, TOKENS, Arrays
from model.config import ModelConfig
from model.layers import matmul, vary
from model.params import param_specs, use_params

_MASKED = -1e30  # logit of vocabulary padding; finite, so that its gradient is 0 and not NaN


class LossSums(NamedTuple):
    """Float32 scalars, summed over the whole batch.

    nll: weight * -log p(target), nats. z: weight * logsumexp(logits)^2. correct: weight where no
    other token has a higher logit than the target.
    """

    nll: jax.Array
    z: jax.Array
    correct: jax.Array


def loss_sums(
    params: Arrays,
    cfg: ModelConfig,
    hidden: jax.Array,
    targets: jax.Array,
    loss_weights: jax.Array,
    mesh: Mesh,
) -> LossSums:
    """Sums over hidden [B, T, D], targets [B, T] int32 and loss_weights [B, T] float32.

    A token of weight 0 contributes nothing and has no gradient, whatever its target. At most
    cfg.loss_chunk tokens per rank have logits at any time, also in the backward.
    """
    specs = (PartitionSpec(None, TENSOR), TOKEN_SPEC, TOKEN_SPEC, TOKEN_SPEC)
    sums = jax.shard_map(
        lambda *arrays: _local_sums(cfg, *arrays),
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec(),
    )
    return sums(_head(params, cfg, mesh), hidden, targets, loss_weights)


def token_scores(
    params: Arrays, cfg: ModelConfig, hidden: jax.Array, targets: jax.Array, mesh: Mesh
) -> tuple[jax.Array, jax.Array]:
    """(nats, whether correct) of each token, float32 and bool [B, T], without a gradient.

    nats: -log p(target). Correct: no other token has a higher logit. At most cfg.loss_chunk tokens
    per rank have logits at any time.
    """
    scores = jax.shard_map(
        lambda *arrays: _local_token_scores(cfg, *arrays),
        mesh=mesh,
        in_specs=(PartitionSpec(None, TENSOR), TOKEN_SPEC, TOKEN_SPEC),
        out_specs=TOKEN_SPEC,
    )
    return scores(_head(params, cfg, mesh), hidden, targets)


def logits(params: Arrays, cfg: ModelConfig, hidden: jax.Array, mesh: Mesh) -> jax.Array:
    """All logits [..., vocab_size] float32 of hidden [..., D], for sampling and tests."""
    head = _head(params, cfg, mesh).astype(cfg.compute_dtype)
    return matmul(hidden, head, out_dtype=jnp.float32)[..., : cfg.vocab_size]


def _head(params: Arrays, cfg: ModelConfig, mesh: Mesh) -> jax.Array:
    """The head [D, V], gathered over fsdp: float32, rounded to values of the compute dtype.

    It is gathered in the compute dtype, and converted back so that the chunks' gradients are summed
    in float32.
    """
    name = "embedding" if cfg.tie_embeddings else "head"
    head = params[name].astype(cfg.compute_dtype)
    head = use_params(head, param_specs(cfg)[name], cfg, mesh)
    return (head.T if cfg.tie_embeddings else head).astype(jnp.float32)


def _local_sums(cfg: ModelConfig, head, hidden, targets, loss_weights) -> LossSums:
    """One rank's tokens and part of the vocabulary, then sums over all ranks."""
    head = vary(head, TOKENS)  # here, so that its gradient is summed over ranks only once
    hidden = vary(hidden, (TENSOR,))

    @jax.checkpoint
    def add(sums: LossSums, chunk) -> tuple[LossSums, tuple[()]]:
        x, target, weight = chunk
        lse, hit, top = _log_sum_and_target(cfg, head, x, target)
        nll = jnp.sum(weight * (lse - hit))
        correct = jnp.sum(jnp.where(hit >= top, weight, 0))
        z = jnp.sum(weight * lse**2)
        return LossSums(sums.nll + nll, sums.z + z, sums.correct + correct), ()

    chunks = tuple(_chunks(x, cfg.loss_chunk) for x in (hidden, targets, loss_weights))
    zero = vary(jnp.float32(0), TOKENS)
    sums, _ = jax.lax.scan(add, LossSums(zero, zero, zero), chunks)
    return jax.tree.map(lambda x: jax.lax.psum(x, TOKENS), sums)


def _local_token_scores(cfg: ModelConfig, head, hidden, targets) -> tuple[jax.Array, jax.Array]:
    """One rank's tokens and part of the vocabulary; equal on all ranks of the vocabulary."""
    head, varying = vary(head, TOKENS), vary(hidden, (TENSOR,))

    def score(chunk) -> tuple[jax.Array, jax.Array]:
        lse, hit, top = _log_sum_and_target(cfg, head, *chunk)
        return lse - hit, hit >= top

    chunks = tuple(_chunks(x, cfg.loss_chunk) for x in (varying, targets))
    found = jax.lax.map(score, chunks)
    return jax.tree.map(lambda x: x.reshape(-1)[: targets.size].reshape(targets.shape), found)


def _log_sum_and_target(
    cfg: ModelConfig, head: jax.Array, hidden: jax.Array, target: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """logsumexp, the target's score and the highest, each [n], over all ranks' vocabulary."""
    first = jax.lax.axis_index(TENSOR) * head.shape[1]
    column = first + jnp.arange(head.shape[1])
    scores = matmul(hidden, head.astype(hidden.dtype), out_dtype=jnp.float32)
    scores = jnp.where(column < cfg.vocab_size, scores, _MASKED)
    is_target = column == target[:, None]
    top = jax.lax.pmax(jax.lax.stop_gradient(scores.max(-1)), TENSOR)
    total = jax.lax.psum(jnp.exp(scores - top[:, None]).sum(-1), TENSOR)
    hit = jax.lax.psum(jnp.where(is_target, scores, 0.0).sum(-1), TENSOR)
    return top + jnp.log(total), hit, top


def _chunks(x: jax.Array, size: int) -> jax.Array:
    """[b, t, ...] -> [chunks, n, ...] with n <= size, evenly divided; padded with zeros."""
    x = x.reshape(-1, *x.shape[2:])
    count = -(-x.shape[0] // size)
    each = -(-x.shape[0] // count)
    x = jnp.pad(x, [(0, count * each - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(count, each, *x.shape[1:])
