"""A whole training step on TPU, compiled: memory of a device, bundles, and what they go to.

    python -m benchmarks.step_tpu
    python -m benchmarks.step_tpu --tokens 32768 --topology v6e:2x2 --width 1024

A decoder of four KDA layers, scanned and rematerialised, heads of 128, FFN 2.75 times the width, a
vocabulary of 32,768, bf16, AdamW, one row of T tokens over a context axis of 4; compiled for four
devices of a topology that need not be here. Decimal MB. Bundles as estimate/bundles.py reads
them: each program once, so a layer's count once for all layers, and q's convolution for k's and
v's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

VOCABULARY = 32768
KERNELS = ("kda_forward", "kda_backward", "short_conv_forward", "short_conv_backward")


def large_config(tokens: int, width: int):
    """The main config's with the sizes named above."""
    from configs import kda_cp4

    config = kda_cp4.get_config()
    config.model.update(
        d_model=width, kda_heads=width // 128, key_dim=128, value_dim=128, gate_rank=128,
        d_ff=width * 11 // 4, num_repeats=4, compute_dtype="bfloat16",
    )  # fmt: skip
    config.data.update(global_batch_size=1, sequence_length=tokens)
    config.optimizer.name = "adamw"
    return config


def build(devices, config, vocabulary: int):
    """(jitted step of a config, its abstract arguments) on the first of `devices`."""
    import jax
    import numpy as np

    import train
    from model.axes import MESH_AXES
    from training.optimizer import OptimizerConfig, make_optimizer, make_schedule
    from training.state import state_shapes
    from training.step import StepConfig, batch_shapes, make_train_step

    shape = tuple(config.mesh[name] for name in MESH_AXES)
    mesh = jax.sharding.Mesh(np.array(devices[: np.prod(shape)]).reshape(shape), MESH_AXES)
    model, data = train.model_config(config, vocab_size=vocabulary), config.data
    options = OptimizerConfig(**config.optimizer)
    optimizer, schedule = make_optimizer(options, model), make_schedule(options)
    shapes = state_shapes(model, mesh, optimizer, data.global_batch_size, config.train.spike_window)
    step = make_train_step(StepConfig(), model, mesh, optimizer, schedule, shapes)
    votes = jax.ShapeDtypeStruct(
        (mesh.size,), np.int32, sharding=jax.NamedSharding(mesh, jax.P(MESH_AXES))
    )
    return step, (
        shapes,
        batch_shapes(mesh, 1, data.global_batch_size, data.sequence_length),
        votes,
    )


def compile_here(tokens: int, topology: str, width: int) -> dict[str, float]:
    """This process's environment says where schedules go."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    step, arguments = build(devices, large_config(tokens, width), VOCABULARY)
    memory = step.lower(*arguments).compile().memory_analysis()
    return {
        "peak": memory.peak_memory_in_bytes / 1e6,
        "state": memory.argument_size_in_bytes / 1e6,
        "temporary": memory.temp_size_in_bytes / 1e6,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--topology", default="tpu7x:2x2x1")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(compile_here(args.tokens, args.topology, args.width)))
        return
    from training.estimate import bundles

    with tempfile.TemporaryDirectory(prefix="step_tpu_") as dump:
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.step_tpu", "--child", *sys.argv[1:]],
            env=os.environ | bundles.compiler_environment(dump),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        memory, found = json.loads(child.stdout.splitlines()[-1]), bundles.read(dump)
    print(
        f"T {args.tokens}  width {args.width}  {args.topology}  peak {memory['peak']:.0f} MB "
        f"(state and batch {memory['state']:.0f}, temporary {memory['temporary']:.0f})"
    )
    print(f"bundles {found.total}, of them")
    for name in KERNELS:
        print(f"  {name:20s} {found.of(name):9d}")
    others = sorted(found.programs.items(), key=lambda x: -x[1])
    for name, count in [x for x in others if not x[0].startswith(KERNELS)][:12]:
        print(f"  {name:60s} {count:9d}")


if __name__ == "__main__":
    main()
