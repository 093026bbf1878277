"""Exported folders, loaded by transformers, give our logits.

Runs if TRANSFORMERS_PYTHON names a Python with torch and transformers (for versions see
tests/golden); docs/measurements.md has the latest figures.
"""

import dataclasses
import os
import pathlib
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest

from model.convert.registry import FORMATS
from model.decoder import forward, init_carry
from model.loss import logits
from tests.model_cases import KDA, VOCABULARY, make_mesh, make_params, worst_error
from tests.tolerances import MODEL_FLOAT32
from training.state import flatten
from training.weights import SpecialTokens, write_folder

PYTHON = os.environ.get("TRANSFORMERS_PYTHON", "")
SCRIPT = pathlib.Path(__file__).parents[1] / "referee_transformers.py"
CFG = dataclasses.replace(KDA, key_dim=16, value_dim=16, gate_rank=16, num_repeats=3)
HYBRID = dataclasses.replace(
    CFG,
    pattern="kda, kda, mla, kda, mla",
    num_repeats=1,
    mla_heads=4,
    mla_kv_rank=20,
    mla_nope_dim=12,
    mla_rope_dim=6,
    mla_value_dim=10,
)
EXPERTS = dataclasses.replace(
    HYBRID,
    pattern="kda, mla",
    ffn="swiglu, experts",
    num_experts=6,
    experts_per_token=3,
    expert_d_ff=12,
    shared_experts=2,
    router_scale=1.7,
)


@pytest.mark.skipif(not PYTHON, reason="TRANSFORMERS_PYTHON names no Python with transformers")
@pytest.mark.parametrize(
    "cfg", [CFG, dataclasses.replace(CFG, tie_embeddings=True), HYBRID, EXPERTS]
)
def test_transformers_has_our_logits(tmp_path, cfg):
    params = make_params(cfg)
    folder = str(tmp_path / "export")
    write_folder(
        folder, flatten(params).__getitem__, cfg, FORMATS["kimi_linear"], SpecialTokens(59, 60)
    )
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 70))
    np.save(tmp_path / "tokens.npy", tokens)
    # This environment's OpenBLAS settings would slow down the other one's.
    env = {name: x for name, x in os.environ.items() if not name.startswith("OPENBLAS")}
    arguments = [PYTHON, str(SCRIPT), folder, tmp_path / "tokens.npy", tmp_path / "logits.npy"]
    subprocess.run(arguments, check=True, env=env, timeout=300)
    ids = jnp.ones(tokens.shape, jnp.int32)
    arrays = jnp.asarray(tokens, jnp.int32), ids, jnp.zeros(2, bool), init_carry(cfg, 2)
    hidden, _, _ = forward(params, cfg, *arrays, make_mesh())
    ours = np.asarray(logits(params, cfg, hidden, make_mesh()))
    error, _ = worst_error(ours, np.load(tmp_path / "logits.npy"))
    print(f"relative RMS error of the logits: {error:.1e}")
    assert error < MODEL_FLOAT32
