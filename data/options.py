"""Options of the data pipeline, `config.data`. The shuffling seed is `config.train.seed`."""

import dataclasses

import options
from options import option

SOURCES = ("stdlib", "text", "jsonl", "parquet", "array_record")
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
        "row or record.",
        choices=SOURCES,
    )
    path: str = option(
        "", 'File or folder of the documents. Required by every source except "stdlib".'
    )
    field: str = option("text", "JSONL key or Parquet column that holds the text.")
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
    check_related(config)


def check_related(config: DataConfig) -> None:
    """Checks options whose constraint depends on another option."""
    source = config.source
    packed = source != "stdlib"
    if config.path and not packed:
        raise _wrong(
            config,
            "path",
            "to be empty with config.data.source='stdlib'",
            "--config.data.source=" + " or ".join(SOURCES[1:]),
        )
    if packed and not config.path:
        needs = f"the path of a file or folder with config.data.source={source!r}"
        raise _wrong(config, "path", needs, "--config.data.path=FOLDER")
    if config.eval_path and not packed:
        needs = "to be empty with config.data.source='stdlib', which holds out files"
        raise _wrong(config, "eval_path", needs, "''")
    if source in ("jsonl", "parquet") and not config.field:
        needs = "the name of the " + ("key" if source == "jsonl" else "column") + " of the text"
        raise _wrong(config, "field", needs, "text")
    if not config.tokenizer:
        needs = "'bytes', the path of a tokenizer.json or of a SentencePiece .model"
        raise _wrong(config, "tokenizer", needs, "bytes")


def _wrong(config: DataConfig, name: str, needs: str, suggestion: str) -> options.OptionError:
    return options.wrong(f"config.data.{name}", getattr(config, name), needs, suggestion)
