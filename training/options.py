"""Options of a run beside its data and model: `config.train`, `mesh`, `optimizer`, `eval`,
`checkpoint`, `log` and `profile`. No JAX is imported here."""

import dataclasses

from options import option


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """`config.train`."""

    steps: int = option(
        1000,
        "Optimizer steps of the whole run, those before a resume included.",
        unit="steps",
        minimum=1,
        renamed_from=("max_steps", "num_steps", "total_steps"),
    )
    seed: int = option(0, "Initial parameters and the order of the data follow from it.", minimum=0)
    tbptt_windows: int = option(
        1,
        "Consecutive rows of each stream in one step; the gradient flows through the state carried "
        "across them, and memory grows by the carried states alone. More than 1 needs "
        'data.packing="stream" and model.carry.',
        unit="rows",
        minimum=1,
        renamed_from=("windows_per_step",),
    )
    grad_accum_steps: int = option(
        1,
        "Parts into which a step's rows are cut, processed one after another to save memory; loss "
        "and gradient are those of all rows at once. Divides the rows of a rank.",
        minimum=1,
        renamed_from=("accumulation", "gradient_accumulation_steps"),
    )
    z_loss: float = option(
        0.0,
        "Coefficient of the mean of log(sum(exp(logits)))^2, which keeps logits small; 0: off.",
        minimum=0,
    )
    skip_nonfinite: bool = option(
        False,
        "Skip the update (and the carried state) of a step whose loss or gradient is not finite, "
        "and count it. False: such a step ends the run before it is saved.",
    )
    spike_deviations: float = option(
        0.0,
        "Skip steps whose loss is more than this many standard deviations above the mean of the "
        "last train.spike_window losses; 0: off.",
        minimum=0,
    )
    spike_window: int = option(
        64,
        "Losses that the spike rule looks back on; it applies once there are so many.",
        unit="steps",
        minimum=2,
        on_resume="state",
    )
    compilation_cache: str = option(
        "auto",
        "Folder of compiled programs, kept from one start to the next. auto: kda-trainer in "
        "$XDG_CACHE_HOME or ~/.cache. Empty: none is kept.",
        on_resume="silent",
    )

    @property
    def may_skip(self) -> bool:
        return self.skip_nonfinite or self.spike_deviations > 0


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """`config.mesh`: devices along each axis. On CPU as many devices are simulated; on TPU and GPU
    their product is the number of devices."""

    data: int = option(1, "Devices over which rows are divided.", unit="devices", minimum=1)
    fsdp: int = option(
        1,
        "Devices over which rows and the width of parameters are divided.",
        unit="devices",
        minimum=1,
    )
    expert: int = option(
        1,
        "Devices over which rows, the experts of a layer and the width of parameters are divided.",
        unit="devices",
        minimum=1,
        renamed_from=("ep", "expert_parallel"),
    )
    context: int = option(
        1,
        "Devices over which the tokens of a row are divided.",
        unit="devices",
        minimum=1,
        renamed_from=("sequence", "cp", "seq"),
    )
    tensor: int = option(
        1,
        "Devices over which heads, FFN columns and the vocabulary are divided.",
        unit="devices",
        minimum=1,
        renamed_from=("model", "tp"),
    )


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """`config.optimizer`."""

    name: str = option(
        "adamw",
        '"muon": Muon for the matrices inside layers, AdamW for everything else.',
        choices=("adamw", "muon"),
        on_resume="state",
    )
    learning_rate: float = option(
        1e-3, "The schedule's peak.", above=0, renamed_from=("lr", "peak_lr")
    )
    schedule: str = option(
        "cosine",
        '"cosine": warm up, then half a cosine down. "wsd": warm up, stay, decay at the end.',
        choices=("cosine", "wsd"),
    )
    schedule_steps: int = option(
        0,
        "Steps from the schedule's start to its end; after it the rate stays. 0: train.steps, and "
        "then a run of more steps has another schedule from its first step on.",
        unit="steps",
        minimum=0,
    )
    warmup_steps: int = option(
        100,
        "Steps of linear warm-up from 0; fewer than the schedule's.",
        unit="steps",
        minimum=0,
        renamed_from=("warmup",),
    )
    decay_steps: int = option(
        200,
        'Steps at the schedule\'s end over which "wsd" decays; warm-up and decay fit into it.',
        unit="steps",
        minimum=1,
    )
    min_lr_ratio: float = option(
        0.1,
        "Learning rate at the schedule's end as a share of the peak.",
        minimum=0,
        maximum=1,
        renamed_from=("final_fraction",),
    )
    clip_norm: float = option(
        1.0,
        "The gradient's global norm is at most this.",
        above=0,
        renamed_from=("max_grad_norm", "grad_clip"),
    )
    weight_decay: float = option(
        0.1,
        "Decay in units of the learning rate; not on norms, gates and vectors.",
        minimum=0,
    )
    b1: float = option(0.9, "AdamW's decay of the mean.", minimum=0, below=1)
    b2: float = option(0.95, "AdamW's decay of the square.", minimum=0, below=1)
    eps: float = option(1e-8, "AdamW's term in the denominator.", above=0)
    muon_momentum: float = option(
        0.95,
        "Muon's momentum. Updates are scaled to AdamW's size: one learning rate serves both.",
        minimum=0,
        below=1,
    )


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """`config.eval`."""

    every: int = option(
        200,
        "Steps from one evaluation to the next; there is one at the end of the run too. 0: never.",
        unit="steps",
        minimum=0,
    )
    batches: int = option(
        0,
        "Batches of an evaluation, of data.global_batch_size rows; 0: all validation documents "
        "once.",
        unit="batches",
        minimum=0,
    )


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """`config.checkpoint`."""

    directory: str = option(
        "",
        "Folder, local or gs://bucket/path. Empty: checkpoints/ in the run's own folder.",
        on_resume="silent",
    )
    every: int = option(
        200,
        "Steps from one checkpoint to the next; there is one at the end too. 0: at the end only.",
        unit="steps",
        minimum=0,
        renamed_from=("save_every", "interval"),
    )
    keep_last: int = option(2, "Newest checkpoints that stay.", unit="checkpoints", minimum=1)
    keep_every: int = option(
        0, "Checkpoints of multiples of this step stay; 0: none.", unit="steps", minimum=0
    )
    keep_best: int = option(
        1,
        "Checkpoints with the lowest eval/loss that stay, of the steps that were evaluated and "
        "saved at once.",
        unit="checkpoints",
        minimum=0,
    )
    damaged: str = option(
        "stop",
        'A checkpoint whose bytes have changed since it was written: "stop", or "skip" it.',
        choices=("stop", "skip"),
        on_resume="silent",
    )
    verify: str = option(
        "sizes",
        "How a save is read back before it counts and older ones are removed. sizes: its record, "
        "the index of its arrays and the sizes of its files. digests: every byte as well.",
        choices=("sizes", "digests"),
        on_resume="silent",
    )


@dataclasses.dataclass(frozen=True)
class LogOptions:
    """`config.log`."""

    every: int = option(
        1,
        "Steps from one line (console, JSONL, TensorBoard) to the next.",
        unit="steps",
        minimum=1,
        on_resume="silent",
    )


@dataclasses.dataclass(frozen=True)
class ProfileOptions:
    """`config.profile`."""

    start: int = option(
        0,
        "First step to trace; 0: none. SIGUSR1 traces the next steps at any time.",
        unit="steps",
        minimum=0,
        on_resume="silent",
    )
    steps: int = option(3, "Steps of a trace.", unit="steps", minimum=1, on_resume="silent")
