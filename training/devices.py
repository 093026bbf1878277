"""Chooses the devices of a run before JAX looks for any, and makes their mesh.

JAX is imported only inside functions.
"""

import dataclasses
import glob
import importlib.util
import math
import os
from typing import Any

from errors import UserError
from training import agree, peers, process

MOST_SIMULATED = 1024  # each costs threads and memory; with far more, JAX hangs without an error
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=3600"
_ALL_DAY = 24 * 3600 * 1000  # milliseconds


@dataclasses.dataclass(frozen=True)
class Processes:
    """How the processes of a run find each other: the flags --coordinator, --processes,
    --process_id and --start_timeout (seconds)."""

    coordinator: str = ""  # "": one process, or what GKE says
    count: int = 0  # 0: detected by JAX, whatever the coordinator is
    number: int = -1
    start_timeout: int = 60


def start_jax(
    needed: int, cache: str, processes: Processes, values: agree.Values | None = None
) -> None:
    """Chooses devices. Here the processes of a run wait for each other.

    Args:
        needed: devices of the whole mesh; on CPU they are simulated, equally many per process.
        cache: folder of compiled programs, "auto" for the user's, or "" for none.
        values: must be equal in all processes; see training/agree.py.

    Raises:
        UserError: the devices of a process do not fit the mesh, there are no other processes, or
            no devices of the kind that the environment requests.
    """
    if "JAX_PLATFORMS" not in os.environ and not accelerator():
        # Otherwise libtpu, which is installed everywhere, looks for a TPU and warns.
        os.environ["JAX_PLATFORMS"] = "cpu"
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        wait_for_each_other()
    import jax

    if os.environ.get("JAX_PLATFORMS") == "cpu":
        share, rest = divmod(needed, max(processes.count, 1))
        if rest:
            raise UserError(
                f"--processes={processes.count}: needs a divisor of the mesh's devices ({needed}); "
                "try --processes=1"
            )
        if share > MOST_SIMULATED:
            raise UserError(
                f"config.mesh: needs {share} devices of this process; at most {MOST_SIMULATED} are "
                "simulated on CPU; try smaller axes"
            )
        jax.config.update("jax_num_cpu_devices", share)
    if cache:
        from training import programs  # imports JAX

        programs.keep(programs.default_folder() if cache == "auto" else cache)
    # The trainer handles SIGTERM itself; JAX's preemption service would intercept it.
    jax.config.update("jax_enable_preemption_service", False)
    if processes.coordinator or tpu_pod():
        meet(processes, values or {})
    try:
        jax.devices()
    except Exception as error:  # JAX has several kinds
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: JAX finds no such devices "
            f"({text}); try JAX_PLATFORMS=cpu"
        ) from None


def wait_for_each_other() -> None:
    """Raises XLA's limits; call it before JAX is imported. Simulated devices share cores, so on a
    busy machine one may reach a collective long after another, and XLA's default limit of 40 s
    would end the process."""
    os.environ["XLA_FLAGS"] = f"{PATIENCE} {os.environ.get('XLA_FLAGS', '')}"


def meet(processes: Processes, values: agree.Values) -> None:
    """Connects the processes of a run, and compares their options, code and libraries.

    If they do not connect within `start_timeout` seconds, the process ends with one line.
    """
    bypass_proxies(processes.coordinator)
    process.mute_native_stdout()
    peers.watch(processes.number)
    with peers.limit(processes.start_timeout, _not_met(processes)):
        _meet(processes, values)


def _not_met(processes: Processes) -> str:
    who = "all processes" if processes.count == 0 else f"all {processes.count} processes"
    return (
        f"--coordinator={processes.coordinator or 'auto'}: {who} did not meet there within "
        f"{processes.start_timeout} s; they need the same host:port, which all can reach, and "
        "--process_id from 0 on, each once; try again, or a larger --start_timeout"
    )


def _meet(processes: Processes, values: agree.Values) -> None:
    import jax
    from jax._src import distributed  # the only way to the store that all processes share

    jax.config.update("jax_check_proxy_envs", False)  # bypass_proxies has handled them
    found = processes.count == 0
    try:
        jax.distributed.initialize(
            None if found else processes.coordinator,
            None if found else processes.count,
            None if found else processes.number,
            initialization_timeout=processes.start_timeout + 60,  # after `peers.limit`
            heartbeat_timeout_seconds=peers.HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=peers.HEARTBEAT_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(
            f"--coordinator={processes.coordinator}: JAX found no processes ({text}); "
            "try --coordinator=host:port --processes=2 --process_id=0"
        ) from None
    state = distributed.global_state
    peers.set_number(state.process_id)
    assert state.client is not None
    agree.check(state.client, values, state.process_id, state.num_processes)


def wait_for_all(point: str) -> None:
    """Waits until every process has reached this point, which has a name and is passed once.

    For points that processes reach at very different times, such as the end of compilation, where
    Gloo's first collective would time out after 30 s. If a process dies, the wait ends.
    """
    from jax._src import distributed

    client = distributed.global_state.client
    if client is not None and distributed.global_state.num_processes > 1:
        client.wait_at_barrier(point, timeout_in_ms=_ALL_DAY)


def bypass_proxies(coordinator: str) -> None:
    """Makes the processes of a run connect directly, whatever proxy the environment sets.

    gRPC would ask the proxy for the coordinator and wait minutes for an answer.
    """
    hosts = ["localhost", "127.0.0.1", "::1", coordinator.rpartition(":")[0].strip("[]")]
    hosts += os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        given = os.environ.get(name, "").split(",")
        os.environ[name] = ",".join(dict.fromkeys(filter(None, [*given, *hosts])))


def accelerator() -> bool:
    """Whether this machine has a TPU, or an NVIDIA GPU that the installed JAX can use."""
    devices = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    named = any(name in os.environ for name in ("TPU_NAME", "TPU_WORKER_ID", "COLAB_TPU_ADDR"))
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    gpu = os.path.exists("/dev/nvidiactl") and any(map(importlib.util.find_spec, plugins))
    return bool(devices) or named or gpu


def tpu_pod() -> bool:
    """Whether GKE has started several TPU hosts together, which then find each other."""
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return accelerator() and len(hosts.split(",")) > 1


def make_mesh(mesh: Any) -> Any:
    """The mesh of config.mesh over all devices of all processes.

    Raises:
        UserError: it needs more or fewer devices than there are, or context would cross slices.
    """
    import jax

    axes = dict(mesh)
    needed, found = math.prod(axes.values()), jax.device_count()
    if needed != found:
        raise UserError(
            f"config.mesh: {' x '.join(map(str, axes.values()))} ({' x '.join(axes)}) needs "
            f"{needed} devices; there are {found} ({jax.devices()[0].device_kind}); "
            f"try {_fitting_mesh(axes, found)}"
        )
    from training.mesh import arrange  # imports JAX

    return arrange(axes, jax.devices())


def _fitting_mesh(axes: dict[str, int], devices: int) -> str:
    """The change of one axis that uses all devices, preferably the context axis."""
    for name in ("context", "data", "fsdp", "expert", "tensor"):
        rest = math.prod(axes.values()) // axes[name]
        if devices % rest == 0:
            return f"--config.mesh.{name}={devices // rest}"
    return f"--config.mesh.context={devices} and 1 for the others"
