"""Options of the data pipeline, `config.data`. The shuffling seed is `config.train.seed`."""

import dataclasses
import math
from typing import NamedTuple

import options
from options import option

LOSS_ON = ("text", "completion", "assistant")
FILE_SOURCES = ("text", "jsonl", "parquet", "array_record")
TASKS = ("ledger", "recall", "palindrome", "stack")
SOURCES = ("stdlib", *FILE_SOURCES, *TASKS)
PACKINGS = ("stream", "whole")
ON_DATA_CHANGE = ("refuse", "continue")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Every option of the data pipeline."""

    source: str = option(
        "stdlib",
        'Format of the documents. "stdlib": the standard library of the running Python, one '
        'document per .py file. "text": a folder (searched recursively, one document per file), '
        "or a single file, which for training is cut at line ends into documents of 64 KiB. "
        '"jsonl", "parquet", "array_record": a file or a folder of files, one document per line, '
        "row or record. "
        + ", ".join(f'"{task}"' for task in TASKS)
        + ": generated documents, of which the loss counts only the answers (docs/data.md).",
        choices=SOURCES,
    )
    mixture: str = option(
        "",
        "Several sources instead of data.source and data.path: `weight source path` for each, "
        'separated by ";", such as "3 text books; 1 jsonl chats.jsonl; 0.5 ledger". Weights are '
        "relative shares of tokens. data.field and data.loss_on apply to the sources that use "
        'them. Needs data.packing="stream".',
    )
    path: str = option(
        "", "File or folder of the documents. Required by every source that reads files."
    )
    field: str = option("text", "JSONL key or Parquet column that holds the text.")
    loss_on: str = option(
        "text",
        'What the loss counts. "text": all text under data.field. "completion": of JSONL lines '
        'with `prompt` and `completion`, the completion. "assistant": of JSONL lines with '
        "`messages`, each with `role` and `content`, the assistant's content.",
        choices=LOSS_ON,
    )
    eval_path: str = option(
        "",
        "Documents for evaluation, in the same format as data.path. Empty: a fraction of data.path "
        "is held out (data.eval_fraction).",
    )
    eval_fraction: float = option(
        0.05,
        "Fraction of the documents held out for evaluation, chosen by a fixed hash of their names "
        "(jsonl, parquet, array_record: of their numbers; a single text file: its last lines). "
        "Not used with data.eval_path.",
        above=0,
        below=1,
    )
    task_length: int = option(
        2048,
        "Tokens per generated document, including the begin and end ids.",
        unit="tokens",
        minimum=256,
    )
    task_documents: int = option(
        100_000,
        "Generated documents per epoch, of which data.eval_fraction are for evaluation.",
        unit="documents",
        minimum=2,
    )
    task_seed: int = option(0, "Seed of generated documents.", minimum=0)
    tokenizer: str = option(
        "bytes",
        '"bytes" (258 ids), or the path of a Hugging Face tokenizer.json or of a SentencePiece '
        ".model.",
    )
    bos_token: str = option(
        "",
        "Token of a tokenizer.json that begins a document. Empty: a new id after its vocabulary. "
        "(A SentencePiece model names its own; if it has none, a new id is used.)",
    )
    eos_token: str = option(
        "",
        "Token of a tokenizer.json that ends a document. Empty: a new id after its vocabulary.",
    )
    sequence_length: int = option(
        2048,
        "Tokens per row over the whole context axis, a multiple of mesh.context.",
        unit="tokens",
        minimum=2,
        renamed_from=("seq_len", "max_length"),
    )
    global_batch_size: int = option(
        4,
        "Rows per step over all devices, a multiple of mesh.data * fsdp * expert * "
        "train.grad_accum_steps; with data.epochs = 0 at most the number of training documents.",
        unit="rows",
        minimum=1,
        renamed_from=("rows", "batch", "batch_size", "train_batch_size"),
    )
    packing: str = option(
        "stream",
        '"stream": each row is a stream; a long document continues in the same row of the next '
        'batch. "whole": a row holds whole documents; documents longer than a row are cut into '
        "independent pieces.",
        choices=PACKINGS,
    )
    packing_bins: int = option(
        8,
        'Rows per stream that "whole" packing fills at the same time; a larger number wastes less '
        "space and delays documents longer.",
        unit="rows",
        minimum=1,
    )
    epochs: int = option(
        0,
        "Passes over the training documents; 0: as many as train.steps needs. With a limit, "
        "processes that hold only some of the rows first read the whole corpus to agree on the "
        "last batch.",
        unit="epochs",
        minimum=0,
    )
    on_data_change: str = option(
        "refuse",
        'What to do if the data differ from the checkpoint\'s. "refuse": stop with an error that '
        'names the difference. "continue": with a different batch size or seed, reassign the '
        'unread documents, each from where it was left ("stream" packing only); read different '
        "documents from their beginning; start with an empty carried state.",
        choices=ON_DATA_CHANGE,
        renamed_from=("if_changed",),
    )
    workers: int = option(
        0,
        "Worker processes that read, tokenize and pack; 0: the trainer's own process does it. The "
        "workers of a host share its rows equally: the largest number up to this one that divides "
        "the rows is used.",
        unit="processes",
        minimum=0,
        on_resume="silent",
    )
    prefetch: int = option(
        2,
        "Batches that a thread prepares and places on the devices ahead of the step.",
        unit="batches",
        minimum=1,
        on_resume="silent",
    )


def check(config: DataConfig) -> None:
    """Checks every option on its own, then the options that depend on each other.

    Constraints that depend on files are checked by `make_loader`.

    Raises:
        OptionError: one line that names the option.
    """
    options.check(config, "data")
    if not config.mixture:
        return check_related(config)
    for name in ("path", "eval_path"):
        if getattr(config, name):
            raise _wrong(config, name, "to be empty with config.data.mixture", "''")
    if config.packing != "stream":
        raise _wrong(config, "packing", "'stream' with config.data.mixture", "stream")
    mixture_weights(config)
    for part in parts_of(config):
        check_related(part)


def check_related(config: DataConfig) -> None:
    """Checks options whose constraint depends on another option."""
    source = config.source
    reads_files = source in FILE_SOURCES
    if config.path and not reads_files:
        raise _wrong(
            config,
            "path",
            f"to be empty with config.data.source={source!r}",
            "--config.data.source=" + " or ".join(FILE_SOURCES),
        )
    if reads_files and not config.path:
        needs = f"the path of a file or folder with config.data.source={source!r}"
        raise _wrong(config, "path", needs, "--config.data.path=FOLDER")
    if config.eval_path and not reads_files:
        needs = f"to be empty with config.data.source={source!r}, which holds out its own documents"
        raise _wrong(
            config, "eval_path", needs, "--config.data.source=" + " or ".join(FILE_SOURCES)
        )
    if config.loss_on != "text" and source != "jsonl":
        needs = f"'text' with config.data.source={source!r}"
        raise _wrong(config, "loss_on", needs, "--config.data.source=jsonl")
    if source in TASKS and config.tokenizer != "bytes":
        needs = f"'bytes' with config.data.source={source!r}"
        raise _wrong(config, "tokenizer", needs, "bytes")
    if source in ("jsonl", "parquet") and not config.field:
        needs = "the name of the " + ("key" if source == "jsonl" else "column") + " of the text"
        raise _wrong(config, "field", needs, "text")
    if not config.tokenizer:
        needs = "'bytes', the path of a tokenizer.json or of a SentencePiece .model"
        raise _wrong(config, "tokenizer", needs, "bytes")


class _Part(NamedTuple):
    """One source of a mixture."""

    weight: float
    source: str
    path: str


def _mixed(config: DataConfig) -> list[_Part]:
    """The sources in data.mixture."""
    parts = []
    for text in filter(str.strip, config.mixture.split(";")):
        weight, source, path = [*text.split(maxsplit=2), "", ""][:3]
        try:
            part = _Part(float(weight), source, path.strip())
        except ValueError:
            part = _Part(0.0, source, path)
        if not 0 < part.weight < math.inf or source not in SOURCES:
            needs = "`weight source path` of each source, separated by ';', with a weight above 0"
            raise _wrong(
                config,
                "mixture",
                f"{needs} and one of {', '.join(SOURCES)}",
                "'3 text a; 1 text b'",
            )
        parts.append(part)
    return parts


def mixture_weights(config: DataConfig) -> tuple[float, ...]:
    """The sources' relative shares of tokens; (1.0,) without a mixture."""
    return tuple(part.weight for part in _mixed(config)) or (1.0,)


def parts_of(config: DataConfig) -> list[DataConfig]:
    """The options of each source separately."""
    if not config.mixture:
        return [config]
    parts = []
    for part in _mixed(config):
        loss_on = config.loss_on if part.source == "jsonl" else "text"
        parts.append(
            dataclasses.replace(
                config, source=part.source, path=part.path, loss_on=loss_on, mixture=""
            )
        )
    return parts


def _wrong(config: DataConfig, name: str, needs: str, suggestion: str) -> options.OptionError:
    return options.wrong(f"config.data.{name}", getattr(config, name), needs, suggestion)
