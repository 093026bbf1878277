"""Topologies, settings that fit, FLOPs, and plans made by the real compiler in another process."""

import json
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.experimental import topologies

from configs import kda_cp4, smoke
from errors import UserError
from model.params import param_specs
from tests.trainer import ROOT, SMOKE, environment
from training.estimate import command, plan, report, suggest
from training.estimate import compile as compiling
from training.estimate.compile import TooLarge, abstract_step, compile_here, vocabulary_of
from training.estimate.flops import program_flops
from training.estimate.plan import compiled_bytes, make_plan
from training.estimate.topology import GENERATIONS, Topology
from training.report import compiled_peak_bytes


@pytest.mark.parametrize(
    ("text", "name", "devices"),
    [
        ("v6e:2x2", "v6e:2x2", 4),
        ("v5litepod-4x4", "v5e:4x4", 16),
        ("v5p:2x2x2", "v5p:2x2x2", 8),
        ("v7x:4x4x4", "tpu7x:4x4x4", 128),
        ("TPU7x:2x2x1", "tpu7x:2x2x1", 8),
    ],
)
def test_a_topology_is_known_by_its_usual_names(text, name, devices):
    topology = Topology.parse(text)
    assert (topology.name, topology.devices) == (name, devices)


@pytest.mark.parametrize("text", ["v6e", "v9:2x2", "v6e:2x2x1", "tpu7x:4x4", "v6e:0x2", ""])
def test_other_topologies_are_refused_with_one_that_works(text):
    with pytest.raises(UserError, match=r"^--plan=.*try \w+:\d") as error:
        Topology.parse(text)
    Topology.parse(str(error.value).split("try ")[1].split(" or")[0])


def test_a_mesh_of_other_size_gets_the_change_that_fits():
    config = kda_cp4.get_config()  # context 4
    suggest.check_devices(config, Topology.parse("v6e:2x2"))
    with pytest.raises(UserError, match=r"16 devices.*needs 4; try --config.mesh.context=16$"):
        suggest.check_devices(config, Topology.parse("v6e:4x4"))


def test_settings_that_need_less_memory_are_tried_in_order(monkeypatch):
    config = kda_cp4.get_config()
    config.model.update(remat="none", kda_state_policy="save")
    config.data.global_batch_size = 4
    tried = []

    def never(changed, topology):
        tried.append((changed.model.remat, changed.model.kda_state_policy,
                      changed.train.grad_accum_steps))  # fmt: skip
        raise TooLarge(2e9, 1e9)

    monkeypatch.setattr(suggest, "make_plan", never)
    with pytest.raises(UserError, match=r"too small \(needs 2.0 GB of 1.0 GB.*try a larger topo"):
        suggest.plan_or_nearest(config, Topology.parse("v6e:2x2"))
    assert tried == [
        ("none", "save", 1), ("full", "save", 1), ("full", "remat", 1),
        ("offload", "remat", 1), ("offload", "remat", 2),
    ]  # fmt: skip
    assert config.model.remat == "none"  # the given config is left alone


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 42.60G of 31.25G hbm. Exceeded hbm capacity by 11.35G.",
            TooLarge,
            "needs 45.7 GB of 33.6 GB",
        ),
        ("config.mesh.tensor=3: needs a divisor", UserError, "config.mesh.tensor=3"),
    ],
)
def test_the_childs_error_is_reported(monkeypatch, tmp_path, text, kind, says):
    def child(*arguments, **_):
        (tmp_path / "error.txt").write_text(text)

    monkeypatch.setattr(compiling.subprocess, "run", child)
    with pytest.raises(kind, match=says):
        compiling.compile_step(kda_cp4.get_config(), "v6e:2x2", str(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_plan_and_its_compiler_at_once(number):
    arguments = ["--config", SMOKE, "--plan", "v6e:1x1"]
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while not (compilers := psutil.Process(process.pid).children()):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        time.sleep(2.0)  # it imports JAX
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, ""), err
    assert f"stopped by {number.name}" in err.splitlines()[-1], err
    assert not psutil.wait_procs(compilers, timeout=60)[1]


def test_flops_count_loops_and_all_devices():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    weights = jnp.zeros((5, 8, 8))

    def layers(x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, weights)[0]

    def program(x):
        return jax.shard_map(layers, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))(x)

    whole = jax.make_jaxpr(layers)(jnp.zeros((16, 8))).jaxpr
    shared = jax.make_jaxpr(program)(jnp.zeros((16, 8))).jaxpr
    assert program_flops(whole) == program_flops(shared) == 2 * 16 * 8 * 8 * 5


def test_rematerialisation_is_counted():
    def loss(x, policy):
        f = jax.checkpoint(lambda x: jnp.sin(x @ x), policy=policy)
        return f(x).sum()

    counts = [
        program_flops(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(jnp.zeros((8, 8)), p).jaxpr)
        for p in (jax.checkpoint_policies.everything_saveable, None)
    ]
    assert counts == [3 * 2 * 8**3, 4 * 2 * 8**3]


def test_the_vocabulary_needs_a_tokenizer_or_a_size():
    config = kda_cp4.get_config()
    assert vocabulary_of(config) == 258
    config.data.tokenizer = "absent/tokenizer.json"
    with pytest.raises(UserError, match=r"no such file.*try --config.model.vocab_size=32768$"):
        vocabulary_of(config)
    config.model.vocab_size = 1000
    assert vocabulary_of(config) == 1000


def test_the_command_prints_and_writes_the_plan_of_its_config(monkeypatch, tmp_path, capsys):
    """The smallest config, compiled in this process for a CPU device; sizes counted by hand."""
    config = smoke.get_config()
    config.model.update(pattern="attention", num_repeats=1, d_model=16, d_ff=24, vocab_size=256)
    config.model.update(attention_heads=2, attention_kv_heads=1, attention_head_dim=8)
    config.data.sequence_length = 16
    monkeypatch.setattr(compiling, "find_devices", lambda *_: jax.devices())
    monkeypatch.setattr(plan, "compile_step", compile_here)
    assert command.run(config, "v6e:1x1", str(tmp_path / "plan.json"), "none") == 0
    text, found = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())
    # Two tables; per layer q and output, k and v, three of the FFN, two norms; the last norm.
    matrices = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24
    parameters = 2 * 256 * 16 + matrices + 3 * 16
    assert found["facts"]["parameters"] == parameters
    assert found["memory"]["parameters"] == found["memory"]["gradients"] == 4 * parameters
    assert 8 * parameters <= found["memory"]["moments"] <= 8 * parameters + 64
    assert found["facts"]["needed"] >= 12 * parameters
    assert found["fits"] and "fits with" in text
    assert found["tokens_a_step"] == 2 * 16 and "a step takes 2 rows x 16 tokens" in text
    assert found["facts"]["model_flops"] >= 6 * 32 * (matrices + 256 * 16)
    assert found["time"]["total"] > 0 and found["collectives"] == []


@pytest.mark.slow
def test_memory_is_that_of_a_run():
    """Compiled in another process from the config alone, and here as a run compiles it."""
    config = smoke.get_config()
    ranks = int(np.prod(list(config.mesh.values())))
    step, arguments, *_ = abstract_step(jax.devices()[:ranks], config, vocabulary_of(config))
    assert compiled_bytes(config) == compiled_peak_bytes(step.lower(*arguments).compile())


def main_step(**changes):
    """`abstract_step` of the main config with changed options, a double underscore for the dot."""
    config = kda_cp4.get_config()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2")
    return abstract_step(topology.devices, config, 258)


@pytest.mark.slow
def test_a_plan_of_the_main_config():
    found = make_plan(kda_cp4.get_config(), Topology.parse("v6e:2x2"))
    assert found.fits and found.devices == 4
    assert set(found.kernel_bundles) >= {"kda_forward", "kda_backward", "short_conv_forward"}
    parts = found.memory
    _, (state, *_), model, _ = main_step()
    specs = jax.tree.leaves(param_specs(model))
    pairs = zip(jax.tree.leaves(state.params), specs, strict=True)
    small = sum(x.size for x, spec in pairs if not spec.is_matrix)
    # Matrices are divided over the four ranks; the rest, gains and taps, is whole on each.
    assert parts.parameters == 4 * small + (found.facts.parameters - small)
    assert 0 < found.time.waiting < found.time.total
    assert any(c.axes == ("context",) for c in found.collectives)
    assert found.facts.hardware_flops > found.facts.model_flops
    assert "fits" in report.as_text(found) and '"fits": true' in report.as_json(found)


@pytest.mark.slow
def test_hardware_flops_are_of_recomputation_and_of_muon():
    """Recomputed layers add one forward to a step of one forward and a backward of two. Muon adds
    five Newton-Schulz iterations of three products per matrix of layers."""

    def flops(**changes) -> float:
        step, arguments, *_ = main_step(**changes)
        return program_flops(step.trace(*arguments).jaxpr.jaxpr)

    plain = flops(optimizer__name="adamw", model__remat="none")
    recomputed = flops(optimizer__name="adamw", model__remat="full")
    assert recomputed - plain == pytest.approx(plain / 3, rel=0.01)
    _, (state, *_), *_ = main_step()
    matrices = [x.shape for x in jax.tree.leaves(state.params["blocks"]) if x.ndim == 3]
    each = [
        repeats * 5 * (4 * small**2 * large + 2 * small**3)
        for repeats, *sides in matrices
        for small, large in [sorted(sides)]
    ]
    assert flops(model__remat="none") - plain == pytest.approx(sum(each), rel=0.05)


def test_generations_are_consistent():
    for generation in GENERATIONS.values():
        # A bundle issues two products of 8 rows at the most, on each core.
        at_peak = generation.flops_a_second / (generation.clock * generation.cores)
        assert 1e5 < at_peak < 1e6, generation.name
