"""The command line: flags, the config file and its overrides; each mistake is a one-line error.

config_flags does the parsing. Each override is first looked up and its value rewritten in the form
that config_flags accepts, because config_flags reports errors as tracebacks and rejects values
whose meaning is clear (1e3 for an integer).
"""

import difflib
import importlib.util
import os
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import check, document
from errors import UserError

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")

AUTO = "auto"  # --coordinator: let JAX detect it

# A separate set of flags: libraries define theirs in flags.FLAGS, and those are not options here.
_FLAGS = flags.FlagValues()
flags.DEFINE_string(
    "workdir", "", "Folder of the run. Default: runs/<config name>.", flag_values=_FLAGS
)
flags.DEFINE_string(
    "init_from",
    "",
    "Start a new run from these parameters: the workdir of another run, its checkpoint folder "
    "(local or gs://bucket/path), or a Hugging Face folder of weights.",
    flag_values=_FLAGS,
)
flags.DEFINE_bool(
    "eval_only",
    False,
    "Evaluate the newest checkpoint of --workdir, or the parameters of --init_from, on the "
    "validation data, and exit. The run's folder is not changed.",
    flag_values=_FLAGS,
)
flags.DEFINE_string(
    "eval_json", "", "File to which --eval_only also writes its results.", flag_values=_FLAGS
)
flags.DEFINE_string(
    "coordinator",
    "",
    'host:port of process 0, if several processes train together; "auto": detected by JAX, on '
    "TPU VMs, Slurm and others. A TPU slice on GKE needs no flag.",
    flag_values=_FLAGS,
)
flags.DEFINE_integer("processes", 0, "Number of processes; 0: detected by JAX.", flag_values=_FLAGS)
flags.DEFINE_integer("process_id", -1, "This process's number, from 0.", flag_values=_FLAGS)
flags.DEFINE_integer(
    "start_timeout",
    60,
    "Seconds that processes which train together wait for each other when they start.",
    lower_bound=1,
    flag_values=_FLAGS,
)
flags.DEFINE_string(
    "plan",
    "",
    "Compile the step for this TPU topology, which may be absent, print memory, collectives and an "
    "estimated step time, and exit. Examples: v6e:2x2, tpu7x:4x4x4 (v5e, v5p, v6e, tpu7x).",
    flag_values=_FLAGS,
)
flags.DEFINE_string(
    "plan_json", "", "File to which --plan also writes its figures.", flag_values=_FLAGS
)
flags.DEFINE_string(
    "plan_factors",
    "",
    "File of speeds that --plan uses, as `make tpu-check` writes it. Default: "
    "~/.config/kda-trainer/tpu_factors.json, if it exists; none: the built-in speeds.",
    flag_values=_FLAGS,
)
flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=_FLAGS)
# Options that are paths, except those of data, which the document source expands itself.
PATHS = (("checkpoint", "directory"), ("data", "tokenizer"), ("train", "compilation_cache"))
_OWN = (
    *("config", "workdir", "init_from", "eval_only", "eval_json", "plan", "plan_json"),
    *("plan_factors", "coordinator", "processes", "process_id", "start_timeout", "help"),
)
# Arguments of other trainers, beside the names of options (`renamed_from`).
_FOLDER = "try --workdir=FOLDER"
_DEVICES = "try --config.mesh.data=N, or fsdp, context, tensor: their product is the devices"
_OTHER_NAMES = {
    **dict.fromkeys(("output_dir", "out_dir", "logdir", "log_dir", "save_dir"), _FOLDER),
    **dict.fromkeys(("devices", "gpus", "num_devices", "nproc_per_node"), _DEVICES),
    "resume": "not needed: the same command resumes",
    "resume_from_checkpoint": "not needed: the same command resumes",
}


def parse(argv: list[str]) -> tuple[ConfigDict, flags.FlagValues]:
    """The locked config with its overrides, and the other flags.

    Args:
        argv: as sys.argv.

    Raises:
        UserError: one line that names the flag or option and says what works.
        SystemExit: help was requested and printed.
    """
    if {"--help", "-h", "-help"} & set(argv):
        print(_help())
        raise SystemExit(0)
    path, overrides, rest = _split(argv[1:])
    config = _load(path)
    canonical = [_canonical(config, name, value) for name, value in overrides]
    arguments = [argv[0], f"--config={path}", *canonical, *rest]
    try:
        holder = config_flags.DEFINE_config_file(
            "config", lock_config=True, flag_values=_FLAGS, sys_argv=arguments
        )
        left = _FLAGS(arguments)
    except flags.UnrecognizedFlagError as error:
        raise UserError(f"unknown argument --{error.flagname}; {_hint(error.flagname)}") from None
    except (flags.Error, ValueError, TypeError) as error:
        raise UserError(" ".join(str(error).split())) from None
    if len(left) > 1:
        raise UserError(f"unknown argument {left[1]!r}; needs --name=value; {_hint(left[1])}")
    if "://" in _FLAGS.workdir:
        raise UserError(
            f"--workdir={_FLAGS.workdir}: needs a local folder; only checkpoints can be in a "
            f"bucket; try --config.checkpoint.directory={_FLAGS.workdir}"
        )
    _check_processes()
    _expand_home(holder.value)
    return holder.value, _FLAGS


def _expand_home(config: ConfigDict) -> None:
    """Expands the ~ of --name=~/folder, which a shell does not."""
    for group, name in PATHS:
        config[group][name] = os.path.expanduser(config[group][name])
    for flag in ("workdir", "init_from"):
        setattr(_FLAGS, flag, os.path.expanduser(getattr(_FLAGS, flag)))


def _help() -> str:
    shown = "\n".join(f"  --{name}: {_FLAGS[name].help}" for name in _OWN if name in _FLAGS)
    return (
        "usage: python train.py --config configs/kda_cp4.py [--config.group.option=value ...]\n"
        f"  --config: the config file\n{shown}\n\noptions:\n{document.help_text()}"
    )


def _split(arguments: list[str]) -> tuple[str, list[tuple[str, str | None]], list[str]]:
    """The config's path; (dotted option, value or None) of each override; all other arguments."""
    path: str | None = None
    overrides: list[tuple[str, str | None]] = []
    rest: list[str] = []
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        index += 1
        name, equals, value = argument.partition("=")
        bare = name.lstrip("-")
        negated = bare.startswith("noconfig.")
        if not name.startswith("-") or not (bare.startswith("config") or negated):
            rest.append(argument)
            continue
        given = value if equals else None
        follows = index < len(arguments) and not arguments[index].startswith("--")
        if not equals and not negated and follows:
            given = arguments[index]
            index += 1
        if bare == "config":
            path = given
        elif negated:
            overrides.append((bare.removeprefix("noconfig."), "false"))
        elif bare.startswith("config."):
            overrides.append((bare.removeprefix("config."), given))
        else:
            rest.append(argument)
    if not path:
        files = [argument for argument in rest if argument.endswith(".py")]
        near = files[0] if files else "configs/kda_cp4.py"
        raise UserError(f"--config: is missing; needs a config file; try --config {near}")
    return path, overrides, rest


def _load(path: str) -> ConfigDict:
    if not os.path.isfile(path):
        folder = os.path.dirname(path) or "."
        try:
            names = sorted(n for n in os.listdir(folder) if n.endswith(".py") and n[0] != "_")
        except OSError:
            names = []
        close = difflib.get_close_matches(os.path.basename(path), names, 1)
        near = os.path.join(folder, close[0]) if close else "configs/kda_cp4.py"
        raise UserError(f"--config={path}: there is no such file; try {near}")
    try:
        spec = importlib.util.spec_from_file_location("config_file", path)
        if spec is None or spec.loader is None:
            raise UserError("not a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config = module.get_config()
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise UserError(
            f"--config={path}: cannot be read ({type(error).__name__}: {text}); "
            "needs a function get_config() as in configs/smoke.py"
        ) from None
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"--config={path}: get_config() must return the ConfigDict of configs/base.py"
        )
    return config


def _canonical(config: ConfigDict, name: str, value: str | None) -> str:
    current = _lookup(config, name)
    if isinstance(current, ConfigDict):
        raise UserError(
            f"config.{name}: is a group of options; set one of them, "
            f"such as --config.{name}.{next(iter(current))}=..."
        )
    if value is None:
        if not isinstance(current, bool):
            raise UserError(f"config.{name}: needs a value; try --config.{name}={current}")
        value = "true"
    return f"--config.{name}={_value(name, current, value)}"


def _lookup(config: ConfigDict, name: str) -> Any:
    here: Any = config
    done: list[str] = []
    for part in name.split("."):
        if not isinstance(here, ConfigDict):
            raise UserError(f"config.{name}: config.{'.'.join(done)} is an option, not a group")
        if part not in here:
            raise UserError(f"config.{name}: there is no such option; try {_near(name)}")
        here = here[part]
        done.append(part)
    return here


def _hint(argument: str) -> str:
    """Suggests what an unknown argument may have meant."""
    name = argument.lstrip("-").partition("=")[0]
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    found = check.hints(name)
    return f"try --config.{found[0]}=..." if found else "try --help"


def _near(name: str) -> str:
    """The options that the name may have meant."""
    found = check.hints(name)
    return " or ".join(f"config.{option}" for option in found) or "one of docs/configuration.md"


def _value(name: str, current: Any, text: str) -> str:
    """The text in the form that config_flags accepts for an option of this type."""
    if isinstance(current, bool):
        return _bool(name, text)
    if isinstance(current, int):
        return _int(name, current, text)
    if isinstance(current, float):
        try:
            float(text)
        except ValueError:
            raise UserError(f"config.{name}={text}: needs a number; try {current}") from None
        return text
    # Strings: users write "none" for an option whose value for off is "".
    return "" if text.lower() == "none" and current == "" else text


def _bool(name: str, text: str) -> str:
    if text.lower() in _TRUE:
        return "true"
    if text.lower() in _FALSE:
        return "false"
    raise UserError(f"config.{name}={text}: needs true or false; try true")


def _int(name: str, current: int, text: str) -> str:
    try:
        return str(int(text.replace("_", "")))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        needs = "0 to switch it off" if text.lower() == "none" else "a whole number"
        raise UserError(f"config.{name}={text}: needs {needs}; try {current or 0}") from None
    if not number.is_integer():
        near = f"{int(number)}" if abs(number) < 1e15 else f"{current}"
        raise UserError(f"config.{name}={text}: needs a whole number; try {near}")
    return str(int(number))


def _check_processes() -> None:
    coordinator, count, number = _FLAGS.coordinator, _FLAGS.processes, _FLAGS.process_id
    if not coordinator:
        if count not in (0, 1) or number >= 0:
            raise UserError(
                f"--coordinator: is missing; --processes={count} --process_id={number} need it; "
                "try --coordinator=localhost:1234"
            )
        return
    if coordinator == AUTO:
        if count or number >= 0:
            raise UserError(
                f"--coordinator={AUTO}: detects the processes; try it without "
                "--processes and --process_id, or --coordinator=host:port with them"
            )
        return
    if count < 1:
        raise UserError(f"--processes={count}: needs the number of processes; try --processes=2")
    if not 0 <= number < count:
        raise UserError(f"--process_id={number}: needs 0 to {count - 1}; try --process_id=0")
    host, _, port = coordinator.rpartition(":")
    if not host or not (port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(
            f"--coordinator={coordinator}: needs host:port with a port from 1 to 65535, or {AUTO}; "
            f"try {host or coordinator}:1234"
        )


def config_file(parsed: flags.FlagValues) -> str:
    """The path given as --config."""
    return parsed["config"].config_filename  # type: ignore[attr-defined]  # config_flags' own kind


def config_name(argv_path: str) -> str:
    """The name of the run's folder: kda_cp4 for configs/kda_cp4.py."""
    return os.path.splitext(os.path.basename(argv_path))[0]
