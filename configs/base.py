"""Every option: default, unit, constraint. `check` holds the rules across options.

A config is a file whose get_config() starts from this one's and changes what differs. Any option
can be set from the command line: --config.train.steps=20.
"""

import difflib
import math
import re

from ml_collections import ConfigDict

from errors import UserError


def get_config() -> ConfigDict:
    """All options, locked. Units stand in the comments; "0: off" means what it says."""
    config = ConfigDict()
    config.train = _train()
    config.mesh = _mesh()
    config.data = _data()
    config.model = _model()
    config.optimizer = _optimizer()
    config.eval = _eval()
    config.checkpoint = _checkpoint()
    config.log = _log()
    config.profile = _profile()
    return config.lock()


def _train() -> ConfigDict:
    train = ConfigDict()
    # Optimizer steps of the whole run, those before a resume included. >= 1.
    train.steps = 1000
    # Initial parameters and the order of the data follow from it. >= 0, < 2^31.
    train.seed = 0
    # Consecutive rows of each stream in one step, gradient flowing through the state carried across
    # them; memory grows by the carried states alone. >= 1; more than 1 needs data.packing="stream".
    train.tbptt_windows = 1
    # Parts that a step's rows are cut into, one after another, to save memory; the loss and the
    # gradient stay those of all rows at once. >= 1, and data.global_batch_size must be a multiple
    # of train.grad_accum_steps * mesh.data * mesh.fsdp.
    train.grad_accum_steps = 1
    # Coefficient of the mean of log(sum(exp(logits)))^2, which keeps logits small. >= 0; 0: off.
    train.z_loss = 0.0
    # Skip the update (and the carried state) of a step whose loss or gradient is not finite, and
    # count it. False: such a step ends the run before it is saved.
    train.skip_nonfinite = False
    # Skip steps whose loss is more than this many standard deviations above the mean of the last
    # train.spike_window losses. >= 0; 0: off.
    train.spike_deviations = 0.0
    # Losses that the spike rule looks back on; it waits until there are so many. >= 2, steps.
    train.spike_window = 64
    # Folder of compiled programs, kept from run to run by JAX. "": none is kept.
    train.compilation_cache = ""
    return train


def _mesh() -> ConfigDict:
    mesh = ConfigDict()
    # Devices along each axis, each >= 1; their product is the number of devices. On CPU as many
    # devices are simulated; on TPU and GPU it must be the number there is.
    mesh.data = 1  # rows
    mesh.fsdp = 1  # rows, and the parameters' width
    mesh.context = 1  # tokens of a row
    mesh.tensor = 1  # heads, FFN columns, vocabulary
    return mesh


def _data() -> ConfigDict:
    data = ConfigDict()
    # Where documents come from: "stdlib", "text", "jsonl", "parquet", "array_record".
    #   stdlib: the running Python's own standard library, one document a .py file.
    #   text: a folder (one document a file, all depths), or a single file, which for training is
    #     cut at lines into documents of 64 KiB.
    #   jsonl, parquet, array_record: a file or a folder of them, one document a line, row, record.
    data.source = "stdlib"
    # File or folder. Needed by every source but stdlib, which takes none.
    data.path = ""
    # JSONL key or Parquet column of the text.
    data.field = "text"
    # Documents for evaluation, of the same kind as data.path. "": some of data.path are held out.
    data.eval_path = ""
    # Share of documents held out, by a fixed hash of their names (of their numbers in jsonl,
    # parquet, array_record; a single text file gives up its last lines). 0 < x < 1.
    data.eval_fraction = 0.05
    # "bytes" (258 ids), or the path of a Hugging Face tokenizer.json or a SentencePiece .model.
    data.tokenizer = "bytes"
    # Tokens of a tokenizer.json that begin and end a document. "": ids after its vocabulary.
    data.bos_token = ""
    data.eos_token = ""
    # Tokens a row, over the whole context axis. >= 2, a multiple of mesh.context.
    data.sequence_length = 2048
    # Rows a step, over all devices. >= 1, a multiple of mesh.data * mesh.fsdp; with data.epochs = 0
    # no more than there are training documents.
    data.global_batch_size = 4
    # "stream": a row is a stream, a long document goes on in the same row of the next batch.
    # "whole": documents whole in a row, longer ones cut into independent pieces.
    data.packing = "stream"
    # Rows that "whole" packing fills at a time. >= 1; more waste less and wait longer.
    data.packing_bins = 8
    # Passes over the training documents. >= 0; 0: as many as train.steps take.
    data.epochs = 0
    # A resume whose data differ from the checkpoint's: "refuse"; or "continue": other rows or
    # another seed deal the same documents anew, each from where it was left, other documents begin
    # at their beginning; the carried state starts empty.
    data.on_data_change = "refuse"
    # Processes that read, tokenize and pack. >= 0; 0: the trainer's own.
    data.workers = 0
    # Batches made ahead of the step. >= 1.
    data.prefetch = 2
    return data


def _model() -> ConfigDict:
    model = ConfigDict()
    # Sizes are in elements and >= 1.
    model.vocab_size = 0  # ids; 0: the tokenizer's
    model.d_model = 256  # a multiple of mesh.fsdp
    # Mixers of one repeat, in order: "kda", "attention", "mla", separated by commas or blanks.
    model.pattern = "kda"
    model.num_repeats = 2  # layers = repeats * length of the pattern
    # Feed-forward layers: one name for all, or one for each mixer of the pattern.
    model.ffn = "swiglu"
    model.d_ff = 768  # a multiple of mesh.tensor
    model.kda_heads = 2  # KDA heads, a multiple of mesh.tensor
    model.key_dim = 128  # K, a head; the TPU kernels want 128
    model.value_dim = 128  # V, a head; the TPU kernels want 128
    model.gate_rank = 128  # inner size of the decay and the output gate, a multiple of mesh.fsdp
    model.conv_kernel_size = 4  # tokens that the causal convolution sees
    # "softplus": decay = -exp(a_log) * softplus(x). "bounded": decay = lower_bound * sigmoid(x).
    model.decay_gate = "softplus"
    model.gate_lower_bound = -5.0  # the bounded gate's floor, nepers a token; -5 <= x < 0
    # Every fresh document starts from a learned state instead of zeros.
    model.learned_initial_state = False
    # Start a continued row from the state that the row before ended with. False: from the start.
    model.carry = True
    # Attention layers, where the pattern has them; heads are multiples of mesh.tensor.
    model.attention_heads = 2
    model.attention_kv_heads = 2  # divides attention_heads
    model.attention_head_dim = 128
    model.attention_block = 512  # tokens a block of the online softmax
    # Tokens before a row that its attention layers see where its first document continues from the
    # row before: their keys and values are carried. >= 0, a multiple of mesh.context; 0: none.
    model.attention_memory = 0
    # MLA layers; attention_block and attention_memory hold for them, too.
    model.mla_heads = 2  # a multiple of mesh.tensor
    model.mla_kv_rank = 512  # size of the latent that holds a token's keys and values
    model.mla_nope_dim = 128  # channels of a head's queries and its own keys
    model.mla_rope_dim = 64  # further channels, whose keys all heads share; not rotated
    model.mla_value_dim = 128  # at most mla_nope_dim + mla_rope_dim
    model.tie_embeddings = False  # the output layer is the embedding's transpose
    model.norm_eps = 1e-5  # > 0
    model.init_std = 0.02  # > 0
    # Type that layers compute in: "bfloat16", "float32". Parameters, optimizer and recurrent state
    # are float32 whatever it is.
    model.compute_dtype = "bfloat16"
    # What a layer keeps for its gradient: "none" (rematerialise nothing), "dots" (keep matrix
    # products), "full" (keep the layer's input alone).
    model.remat = "full"
    model.scan_layers = True  # compile one repeat, not all of them
    model.loss_chunk = 1024  # tokens of a device whose logits exist at one time
    # "auto" (what fits the device), "mosaic_tpu", "chunked", "recurrent".
    model.kda_implementation = "auto"
    # What KDA keeps for its gradient: "remat" (inputs and chunk states), "save" (more, faster).
    model.kda_state_policy = "remat"
    return model


def _optimizer() -> ConfigDict:
    optimizer = ConfigDict()
    # "adamw"; or "muon": Muon for the matrices inside layers, AdamW for everything else.
    optimizer.name = "adamw"
    optimizer.learning_rate = 1e-3  # the schedule's peak, > 0
    # "cosine": warm up, then half a cosine down. "wsd": warm up, stay, go down at the end.
    optimizer.schedule = "cosine"
    # Steps from the schedule's start to its end; after it the rate stays. >= 0; 0: train.steps, and
    # then a run of more steps has another schedule from its first step on.
    optimizer.schedule_steps = 0
    optimizer.warmup_steps = 100  # linear from 0, steps, >= 0 and less than the schedule's
    # Steps at the schedule's end over which "wsd" goes down, >= 1; warmup + decay fit into it.
    optimizer.decay_steps = 200
    optimizer.min_lr_ratio = 0.1  # learning rate at the end as a share of the peak, 0 <= x <= 1
    optimizer.clip_norm = 1.0  # the gradient's global norm is at most this, > 0
    optimizer.weight_decay = 0.1  # a unit of learning rate; not on norms, gates and vectors, >= 0
    optimizer.b1 = 0.9  # AdamW's decay of the mean, 0 <= x < 1
    optimizer.b2 = 0.95  # AdamW's decay of the square, 0 <= x < 1
    optimizer.eps = 1e-8  # > 0
    # Muon's momentum, 0 <= x < 1. Its updates are scaled to AdamW's size: one learning rate.
    optimizer.muon_momentum = 0.95
    return optimizer


def _eval() -> ConfigDict:
    evaluation = ConfigDict()
    # Steps from one evaluation to the next, one at the end of the run too. >= 0; 0: never.
    evaluation.every = 200
    # Batches an evaluation, of data.global_batch_size rows. >= 0; 0: all validation documents once.
    evaluation.batches = 0
    return evaluation


def _checkpoint() -> ConfigDict:
    checkpoint = ConfigDict()
    # Folder, local or gs://bucket/path. "": checkpoints/ in the run's own folder.
    checkpoint.directory = ""
    # Steps from one checkpoint to the next, and one at the end. >= 0; 0: at the end only.
    checkpoint.every = 200
    # What stays: the last so many (>= 1), every step that is a multiple of this (>= 0; 0: none),
    # and the so many best by eval/loss (>= 0) of the steps that were evaluated and saved at once.
    checkpoint.keep_last = 2
    checkpoint.keep_every = 0
    checkpoint.keep_best = 1
    # A checkpoint whose bytes have changed since it was written: "stop", or "skip" it.
    checkpoint.damaged = "stop"
    # How a save is read back before it counts and older ones are removed. "manifest": its record
    # and every array's metadata, a few requests an array. "digests": every byte as well.
    checkpoint.verify = "manifest"
    return checkpoint


def _log() -> ConfigDict:
    log = ConfigDict()
    # Steps from one line (console, JSONL, TensorBoard) to the next. >= 1.
    log.every = 1
    return log


def _profile() -> ConfigDict:
    profile = ConfigDict()
    # First step to trace, >= 1; 0: none. SIGUSR1 traces the next steps at any time.
    profile.start = 0
    profile.steps = 3  # steps a trace, >= 1
    return profile


def check(config: ConfigDict) -> None:
    """Rules that take one look at the options, without reading data or starting JAX.

    Raises:
        UserError: one line that names the option, what it needs, and what would work.
    """
    _check_names(config)
    _check_ranges(config)
    _check_choices(config)
    _check_rows(config)
    _check_schedule(config)
    if not re.fullmatch("(?!.*://).*|gs://[^/]+(/.*)?", config.checkpoint.directory):
        needs = "a local folder or gs://bucket/path"
        raise _wrong(config, "checkpoint.directory", needs, "gs://bucket/run")
    if config.train.tbptt_windows > 1 and config.data.packing != "stream":
        raise _wrong(config, "train.tbptt_windows", 'data.packing="stream"', "1")
    if config.train.tbptt_windows > 1 and not config.model.carry:
        raise _wrong(config, "train.tbptt_windows", "model.carry=True", "1")


# Option: smallest value (or the bound it must lie above), and what to try.
_AT_LEAST = {
    "train.steps": 1,
    "train.seed": 0,
    "train.tbptt_windows": 1,
    "train.grad_accum_steps": 1,
    "train.z_loss": 0,
    "train.spike_deviations": 0,
    "train.spike_window": 2,
    "mesh.data": 1,
    "mesh.fsdp": 1,
    "mesh.context": 1,
    "mesh.tensor": 1,
    "data.sequence_length": 2,
    "data.global_batch_size": 1,
    "optimizer.schedule_steps": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.decay_steps": 1,
    "optimizer.weight_decay": 0,
    "eval.every": 0,
    "eval.batches": 0,
    "checkpoint.every": 0,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 0,
    "checkpoint.keep_best": 0,
    "log.every": 1,
    "profile.start": 0,
    "profile.steps": 1,
}
_MOST = 2**31 - 1  # steps and positions are counted in int32
_POSITIVE = {
    "optimizer.learning_rate": 1e-3,
    "optimizer.clip_norm": 1.0,
    "optimizer.eps": 1e-8,
}
_BELOW_ONE = {"optimizer.b1": 0.9, "optimizer.b2": 0.95, "optimizer.muon_momentum": 0.95}
_CHOICES = {
    "optimizer.name": ("adamw", "muon"),
    "optimizer.schedule": ("cosine", "wsd"),
    "checkpoint.damaged": ("stop", "skip"),
    "checkpoint.verify": ("manifest", "digests"),
    "model.kda_implementation": ("auto", "mosaic_tpu", "chunked", "recurrent"),
}


def _check_names(config: ConfigDict) -> None:
    """A config file unlocks the options to change them, so it can add, remove and retype them."""
    known = get_config()
    for group in [*known, *config]:
        if group not in known or not isinstance(config.get(group), ConfigDict):
            raise UserError(
                f"config.{group}: needs to be one of the groups of options {', '.join(known)}; "
                "try to start from base.get_config() as configs/smoke.py does"
            )
    wanted, given = _flat(known), _flat(config)
    for name in given:
        if name not in wanted:
            near = difflib.get_close_matches(name, wanted, 1) or ["one of configs/base.py"]
            raise UserError(f"config.{name}: there is no such option; try {near[0]}")
    for name, default in wanted.items():
        if name not in given:
            raise UserError(f"config.{name}: is missing; needs a value; try {default!r}")
        whole = isinstance(default, float) and type(given[name]) is int
        if not whole and type(given[name]) is not type(default):
            raise _wrong(config, name, f"a value of type {type(default).__name__}", f"{default!r}")


def _check_ranges(config: ConfigDict) -> None:
    for name, value in _flat(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise _wrong(config, name, "a finite number", "the default in configs/base.py")
        if isinstance(value, int) and value > _MOST:
            raise _wrong(config, name, f"a whole number <= {_MOST}", f"{_AT_LEAST.get(name, 1)}")
    for name, least in _AT_LEAST.items():
        if _get(config, name) < least:
            raise _wrong(config, name, f"a number >= {least}", f"{least}")
    for name, default in _POSITIVE.items():
        if not _get(config, name) > 0:
            raise _wrong(config, name, "a number > 0", f"{default}")
    for name, default in _BELOW_ONE.items():
        if not 0 <= _get(config, name) < 1:
            raise _wrong(config, name, "a number >= 0 and < 1", f"{default}")
    if not 0 <= config.optimizer.min_lr_ratio <= 1:
        raise _wrong(config, "optimizer.min_lr_ratio", "a number from 0 to 1", "0.1")


def _check_choices(config: ConfigDict) -> None:
    for name, choices in _CHOICES.items():
        if _get(config, name) not in choices:
            raise _wrong(config, name, "one of " + ", ".join(choices), choices[0])


def _check_rows(config: ConfigDict) -> None:
    mesh, rows, length = config.mesh, config.data.global_batch_size, config.data.sequence_length
    if length % mesh.context:
        raise _wrong(
            config,
            "data.sequence_length",
            f"a multiple of config.mesh.context ({mesh.context})",
            _multiples(length, mesh.context),
        )
    ranks = mesh.data * mesh.fsdp
    if rows % ranks:
        raise _wrong(
            config,
            "data.global_batch_size",
            f"a multiple of config.mesh.data * config.mesh.fsdp ({ranks})",
            _multiples(rows, ranks),
        )
    if rows % (ranks * config.train.grad_accum_steps):
        raise _wrong(
            config,
            "train.grad_accum_steps",
            f"a divisor of the rows of a rank ({rows // ranks})",
            _divisors(rows // ranks, config.train.grad_accum_steps),
        )


def _check_schedule(config: ConfigDict) -> None:
    optimizer = config.optimizer
    steps = optimizer.schedule_steps or config.train.steps
    text = "optimizer.schedule_steps" if optimizer.schedule_steps else "train.steps"
    if optimizer.warmup_steps and optimizer.warmup_steps >= steps:
        raise _wrong(
            config, "optimizer.warmup_steps", f"less than config.{text} ({steps})", f"{steps // 10}"
        )
    if optimizer.schedule == "wsd" and optimizer.warmup_steps + optimizer.decay_steps > steps:
        raise _wrong(
            config,
            "optimizer.decay_steps",
            f"warmup_steps + decay_steps <= config.{text} ({steps})",
            f"{max(1, steps - optimizer.warmup_steps)}",
        )


def _wrong(config: ConfigDict, name: str, needs: str, works: str) -> UserError:
    return UserError(f"config.{name}={_get(config, name)!r}: needs {needs}; try {works}")


def _get(config: ConfigDict, name: str):
    group, option = name.split(".")
    return config[group][option]


def _flat(config: ConfigDict) -> dict:
    return {
        f"{group}.{name}": value
        for group, options in config.items()
        for name, value in options.items()
    }


def _multiples(value: int, unit: int) -> str:
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else f"{above}"


def _divisors(size: int, near: int) -> str:
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    below = [d for d in divisors if d < near][-1:]
    above = [d for d in divisors if d > near][:1]
    return " or ".join(str(d) for d in below + above)
