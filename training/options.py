"""Options of a run other than its data and model: `config.train`, `mesh`, `optimizer`, `eval`,
`checkpoint`, `log` and `profile`. This module does not import JAX."""

import dataclasses

from options import option


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """`config.train`."""

    steps: int = option(
        1000,
        "Optimizer steps of the whole run, including those before a resume.",
        unit="steps",
        minimum=1,
        renamed_from=("max_steps", "num_steps", "total_steps"),
    )
    seed: int = option(0, "Seed of the initial parameters and of the data order.", minimum=0)
    tbptt_windows: int = option(
        1,
        "Consecutive rows of each stream in one step. The gradient flows through the state carried "
        "between them; memory grows only by the carried states. More than 1 needs "
        'data.packing="stream" and model.carry.',
        unit="rows",
        minimum=1,
        renamed_from=("windows_per_step",),
    )
    grad_accum_steps: int = option(
        1,
        "Parts into which a step's rows are split, processed one after another to save memory. "
        "Loss and gradient are those of all rows together. Must divide the rows of a rank.",
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
        "Losses from which the spike rule computes mean and deviation; it applies once there are "
        "that many.",
        unit="steps",
        minimum=2,
        on_resume="state",
    )
    compilation_cache: str = option(
        "auto",
        "Folder in which compiled programs are kept between starts. auto: kda-trainer in "
        "$XDG_CACHE_HOME or ~/.cache. Empty: none are kept.",
        on_resume="silent",
    )

    @property
    def may_skip(self) -> bool:
        return self.skip_nonfinite or self.spike_deviations > 0


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """`config.mesh`: devices along each axis. On CPU their product is simulated; on TPU and GPU it
    must equal the number of devices."""

    data: int = option(1, "Devices over which rows are split.", unit="devices", minimum=1)
    fsdp: int = option(
        1,
        "Devices over which rows, and the width of parameters, are split.",
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
        "Devices over which the tokens of a row are split.",
        unit="devices",
        minimum=1,
        renamed_from=("sequence", "cp", "seq"),
    )
    tensor: int = option(
        1,
        "Devices over which heads, FFN columns and the vocabulary are split.",
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
        1e-3, "Peak of the schedule.", above=0, renamed_from=("lr", "peak_lr")
    )
    schedule: str = option(
        "cosine",
        '"cosine": warm up, then decay as half a cosine. "wsd": warm up, stay, decay at the end.',
        choices=("cosine", "wsd"),
    )
    schedule_steps: int = option(
        0,
        "Length of the schedule; after it the rate is constant. 0: train.steps, so that increasing "
        "train.steps changes the whole schedule.",
        unit="steps",
        minimum=0,
    )
    warmup_steps: int = option(
        100,
        "Steps of linear warm-up from 0; fewer than the schedule has.",
        unit="steps",
        minimum=0,
        renamed_from=("warmup",),
    )
    decay_steps: int = option(
        200,
        'Steps at the end of the schedule over which "wsd" decays; warm-up and decay must fit into '
        "the schedule.",
        unit="steps",
        minimum=1,
    )
    min_lr_ratio: float = option(
        0.1,
        "Learning rate at the end of the schedule as a fraction of the peak.",
        minimum=0,
        maximum=1,
        renamed_from=("final_fraction",),
    )
    clip_norm: float = option(
        1.0,
        "Gradients with a larger global norm are scaled down to it.",
        above=0,
        renamed_from=("max_grad_norm", "grad_clip"),
    )
    weight_decay: float = option(
        0.1,
        "Weight decay, multiplied by the learning rate; not applied to norms, gates and vectors.",
        minimum=0,
    )
    b1: float = option(0.9, "AdamW's decay rate of the first moment.", minimum=0, below=1)
    b2: float = option(0.95, "AdamW's decay rate of the second moment.", minimum=0, below=1)
    eps: float = option(1e-8, "Added to the denominator of AdamW's update.", above=0)
    muon_momentum: float = option(
        0.95,
        "Muon's momentum. Updates are scaled to AdamW's size, so both use the same learning rate.",
        minimum=0,
        below=1,
    )


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """`config.eval`."""

    every: int = option(
        200,
        "Steps between evaluations; there is also one at the end of the run. 0: never.",
        unit="steps",
        minimum=0,
    )
    batches: int = option(
        0,
        "Batches per evaluation, of data.global_batch_size rows; 0: all validation documents once.",
        unit="batches",
        minimum=0,
    )


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """`config.checkpoint`."""

    directory: str = option(
        "",
        "Folder, local or gs://bucket/path. Empty: checkpoints/ in the run's folder.",
        on_resume="silent",
    )
    every: int = option(
        200,
        "Steps between checkpoints; there is also one at the end. 0: only at the end.",
        unit="steps",
        minimum=0,
        renamed_from=("save_every", "interval"),
    )
    keep_last: int = option(2, "Newest checkpoints to keep.", unit="checkpoints", minimum=1)
    keep_every: int = option(
        0, "Keep checkpoints at multiples of this step; 0: none.", unit="steps", minimum=0
    )
    keep_best: int = option(
        1,
        "Checkpoints with the lowest eval/loss to keep, among steps that were both evaluated and "
        "saved.",
        unit="checkpoints",
        minimum=0,
    )
    damaged: str = option(
        "stop",
        'What to do with a checkpoint whose bytes have changed since it was written: "stop" with '
        'an error, or "skip" it.',
        choices=("stop", "skip"),
        on_resume="silent",
    )
    verify: str = option(
        "sizes",
        "What of a save is read back before it counts and older ones are removed. sizes: its "
        "record, the index of its arrays and the sizes of its files. digests: every byte as well.",
        choices=("sizes", "digests"),
        on_resume="silent",
    )


@dataclasses.dataclass(frozen=True)
class LogOptions:
    """`config.log`."""

    every: int = option(
        1,
        "Steps between reports (console, JSONL, TensorBoard).",
        unit="steps",
        minimum=1,
        on_resume="silent",
    )


@dataclasses.dataclass(frozen=True)
class ProfileOptions:
    """`config.profile`."""

    start: int = option(
        0,
        "First step to trace; 0: none. SIGUSR1 starts a trace at any time.",
        unit="steps",
        minimum=0,
        on_resume="silent",
    )
    steps: int = option(3, "Steps per trace.", unit="steps", minimum=1, on_resume="silent")
