"""Compiles a config's training step for an absent TPU, in a separate process.

libtpu reads its options from the environment before JAX starts, so `compile_step` starts
`python -m training.estimate.compile FOLDER TOPOLOGY` with the config on stdin. The child leaves
facts.json, the program's scheduled HLO and the kernels' schedules in the folder.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from ml_collections import ConfigDict

from errors import UserError
from training.estimate import bundles

HLO, FACTS, ERROR = "step.hlo.txt", "facts.json", "error.txt"
POLL_SECONDS = 0.5
CPU = "cpu"  # topology name of this machine's simulated devices
_OUT_OF_MEMORY = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Facts:
    """The child's report of one compilation. Bytes are per device.

    needed: arguments, results and temporaries, as `memory/compiled_peak_bytes` of a run. live: the
    compiler's peak of memory in use. host: host memory per device, used by remat="offload".
    hardware_flops: per step, of all devices.
    """

    parameters: int
    layers: int
    devices: int
    needed: int
    live: int
    host: int
    arguments: int
    temporaries: int
    parameter_bytes: int
    moment_bytes: int
    carry_bytes: int
    batch_bytes: int
    gradient_bytes: int
    logit_bytes: int
    model_flops: float
    hardware_flops: float
    lower_seconds: float
    compile_seconds: float


class TooLarge(Exception):
    """The compiler found that a step needs more memory than a device has."""

    def __init__(self, used: float, limit: float):
        super().__init__(f"needs {used / 1e9:.1f} GB of {limit / 1e9:.1f} GB")
        self.used, self.limit = used, limit


def compile_step(config: ConfigDict, topology: str, folder: str) -> Facts:
    """Compiles in a child process, which leaves its files in `folder`.

    Raises:
        TooLarge: the step does not fit the memory of a device.
        UserError: the config cannot work; contains the child's message.
    """
    environment = os.environ | bundles.compiler_environment(os.path.join(folder, "schedules"))
    child = subprocess.run(
        [sys.executable, "-m", "training.estimate.compile", folder, topology],
        env=environment,
        input=config.to_json(),
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parents[2],
    )
    facts = pathlib.Path(folder, FACTS)
    if facts.exists():
        return Facts(**json.loads(facts.read_text()))
    error = pathlib.Path(folder, ERROR)
    text = error.read_text() if error.exists() else child.stderr[-2000:]
    if memory := _OUT_OF_MEMORY.search(text):
        used, unit, limit, limit_unit = memory.groups()
        raise TooLarge(float(used) * _UNITS[unit], float(limit) * _UNITS[limit_unit])
    raise UserError(text.strip() or f"--plan: the compiler ended with code {child.returncode}")


# --- in the child --------------------------------------------------------------------------------


def abstract_step(devices: Any, config: ConfigDict, vocabulary: int) -> tuple[Any, tuple, Any, Any]:
    """(jitted step, its abstract arguments, model options, mesh) on the first of `devices`."""
    import jax
    import numpy as np

    from model.axes import MESH_AXES
    from model.checks import check_host_memory, check_mesh
    from model.config import ModelConfig
    from model.mixers.registry import reads_positions
    from training.mesh import arrange
    from training.optimizer import make_optimizer, options_of
    from training.options import TrainOptions
    from training.state import state_shapes
    from training.step import batch_shapes, make_train_step
    from training.tunables import shapes_of, tunables_of

    mesh = arrange(config.mesh, devices[: math.prod(config.mesh.values())])
    model = ModelConfig(**{**config.model, "vocab_size": vocabulary})
    data, train = config.data, config.train
    check_mesh(model, mesh.shape)
    check_host_memory(model, mesh)
    options = options_of(config.optimizer, train.steps)
    tunables = jax.eval_shape(functools.partial(tunables_of, options, train.z_loss))
    make = functools.partial(make_optimizer, options, model, mesh)
    rows = data.global_batch_size
    shapes = state_shapes(model, mesh, make(tunables), rows, train.spike_window)
    step_options = {field.name: train[field.name] for field in dataclasses.fields(TrainOptions)}
    step = make_train_step(TrainOptions(**step_options), model, mesh, make, shapes)
    votes = jax.ShapeDtypeStruct(
        (mesh.size,), np.int32, sharding=jax.NamedSharding(mesh, jax.P(MESH_AXES))
    )
    batch = batch_shapes(
        mesh,
        train.tbptt_windows,
        data.global_batch_size,
        data.sequence_length,
        positions=reads_positions(model),
    )
    return step, (shapes, batch, votes, shapes_of(tunables, mesh)), model, mesh


def vocabulary_of(config: ConfigDict) -> int:
    """config.model.vocab_size, or the tokenizer's, whose file must then exist on this machine.

    Raises:
        UserError: there is neither.
    """
    from data.tokenizer import make_tokenizer

    if config.model.vocab_size:
        return config.model.vocab_size
    data = config.data
    try:
        return make_tokenizer(data.tokenizer, data.bos_token, data.eos_token).vocab_size
    except ValueError as error:
        raise UserError(f"{error}; or try --config.model.vocab_size=32768") from None


def find_devices(topology: str, needed: int) -> Any:
    """Devices of a topology, which may be absent, or simulated CPU devices."""
    import jax
    from jax.experimental import topologies

    if topology == CPU:
        jax.config.update("jax_num_cpu_devices", needed)
        return jax.devices()
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def compile_here(config: ConfigDict, topology: str, folder: str) -> Facts:
    """Compiles in this process, whose environment determines where schedules are written."""
    from training.estimate.flops import program_flops

    devices = find_devices(topology, math.prod(config.mesh.values()))
    step, arguments, model, mesh = abstract_step(devices, config, vocabulary_of(config))
    start = time.monotonic()
    traced = step.trace(*arguments)
    lowered = traced.lower()
    lowered_at = time.monotonic()
    compiled = lowered.compile()
    seconds = (lowered_at - start, time.monotonic() - lowered_at)
    pathlib.Path(folder, HLO).write_text(compiled.as_text())
    flops = program_flops(traced.jaxpr.jaxpr)
    return _facts(config, arguments, model, mesh, compiled, flops, seconds)


def _facts(config, arguments, model, mesh, compiled, flops, seconds) -> Facts:
    from model.flops import key_flops_per_token, train_flops_per_token
    from model.params import param_count
    from training.report import compiled_peak_bytes

    state, batch, *_ = arguments
    memory, needed = compiled.memory_analysis(), compiled_peak_bytes(compiled) or 0
    tokens = _tokens(config)
    a_token = train_flops_per_token(model)
    a_token += key_flops_per_token(model, (config.data.sequence_length + 1) / 2)
    return Facts(
        parameters=param_count(model),
        layers=model.layers,
        devices=mesh.size,
        needed=needed,
        live=memory.peak_memory_in_bytes,
        host=memory.host_temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        parameter_bytes=device_bytes(state.params),
        moment_bytes=device_bytes(state.opt_state),
        carry_bytes=device_bytes(state.carry),
        batch_bytes=device_bytes(batch),
        gradient_bytes=device_bytes(state.params),
        logit_bytes=_logit_bytes(config, model, mesh),
        model_flops=a_token * tokens,
        hardware_flops=flops,
        lower_seconds=seconds[0],
        compile_seconds=seconds[1],
    )


def _tokens(config: ConfigDict) -> int:
    """Tokens per step, over all devices."""
    data = config.data
    return data.global_batch_size * data.sequence_length * config.train.tbptt_windows


def _logit_bytes(config: ConfigDict, model: Any, mesh: Any) -> int:
    """Float32 logits of one chunk of tokens on a device."""
    import math

    from model.axes import TOKENS

    parts = math.prod(mesh.shape[axis] for axis in TOKENS)
    windows = config.train.tbptt_windows * config.train.grad_accum_steps
    tokens = min(model.loss_chunk, _tokens(config) // (parts * windows))
    return 4 * tokens * model.padded_vocab_size // mesh.shape["tensor"]


def device_bytes(tree: Any) -> int:
    """Bytes on one device of a tree of abstract arrays with shardings."""
    import jax

    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def end_with(parent: int) -> None:
    """Ends this process soon after the parent, which a signal may end at any time. Python runs no
    signal handlers while the compiler runs, so a thread checks."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main(folder: str, topology: str) -> None:
    """The child: one compilation, or error.txt with its message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the parent answers
    end_with(os.getppid())
    config = ConfigDict(json.loads(sys.stdin.read()))
    try:
        facts = compile_here(config, topology, folder)
    except Exception as error:  # the parent reports it
        pathlib.Path(folder, ERROR).write_text(f"{error}")
        raise
    pathlib.Path(folder, FACTS).write_text(json.dumps(dataclasses.asdict(facts)))


if __name__ == "__main__":
    main(*sys.argv[1:])
