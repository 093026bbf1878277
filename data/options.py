"""What the data pipeline can be told. `config.data` in configs/base.py has the same names."""

import dataclasses

SOURCES = ("stdlib", "text", "jsonl", "parquet", "array_record")
PACKINGS = ("stream", "whole")
ON_DATA_CHANGE = ("refuse", "continue")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Every option of the data pipeline. The shuffling seed is `config.train.seed`."""

    # Where documents come from:
    #   "stdlib"        the running Python's own standard library, one document a .py file
    #   "text"          a folder (one document a file, all depths), or a single file, which for
    #                   training is cut at lines into documents of 64 KiB
    #   "jsonl"         a .jsonl file or a folder of them, one document a line, text under `field`
    #   "parquet"       a .parquet file or a folder of them, one document a row, text in `field`
    #   "array_record"  an .array_record file or a folder of them, one document (bytes) a record
    source: str = "stdlib"
    # File or folder; needed by every source but "stdlib", which takes none.
    path: str = ""
    # JSONL key or Parquet column that holds the text.
    field: str = "text"
    # Documents for evaluation, in the same format as `path`. "": hold some of `path` out instead.
    eval_path: str = ""
    # Share of documents held out for evaluation by a fixed hash of their names (of their numbers in
    # jsonl, parquet, array_record; a single text file gives up its last lines). 0 < x < 1; not used
    # with `eval_path`.
    eval_fraction: float = 0.05

    # "bytes" (258 ids), the path of a Hugging Face tokenizer.json, or of a SentencePiece .model.
    tokenizer: str = "bytes"
    # Tokens of a tokenizer.json that begin and end a document. "": a new id after its vocabulary.
    # (SentencePiece models name their own; where they have none, a new id after the vocabulary.)
    bos_token: str = ""
    eos_token: str = ""

    # Tokens a row, over the whole context axis. >= 2, a multiple of the context axis.
    sequence_length: int = 2048
    # Rows a step, over all hosts (times tbptt_windows windows). >= 1, a multiple of
    # mesh.data * mesh.fsdp; without `epochs` no more than there are training documents.
    global_batch_size: int = 4
    # "stream": each row is a stream, long documents go on in the same row of the next batch.
    # "whole": documents whole in a row, longer ones cut into independent pieces.
    packing: str = "stream"
    # Rows that "whole" packing fills at a time, a stream. >= 1; more waste less and wait longer.
    packing_bins: int = 8
    # Passes over the training documents; 0 goes on until the run's steps are done. >= 0. With an
    # end, processes that hold only some of the rows first read the whole corpus to agree on it.
    epochs: int = 0

    # When a resumed run's position was saved with other rows, another seed or other documents:
    #   "refuse"  stop with a line that names what changed
    #   "continue"  say so in a line; the same documents are dealt anew, each from where it was left
    #             ("stream" packing only), other documents are read from their beginning
    on_data_change: str = "refuse"

    # Processes that read, tokenize and pack; 0 does it in this one. They share a host's rows out,
    # so the largest number up to this that divides the rows of this host is used. >= 0.
    workers: int = 0
    # Batches made and placed on the devices ahead of the step, by a thread. >= 1.
    prefetch: int = 2

    def check(self) -> None:
        """Raises ValueError, in one line, at the first option that cannot work on its own.

        What depends on files is checked when the loader is made.
        """
        _one_of("source", self.source, SOURCES)
        _one_of("packing", self.packing, PACKINGS)
        _one_of("on_data_change", self.on_data_change, ON_DATA_CHANGE)
        for name, least in (
            ("sequence_length", 2),
            ("global_batch_size", 1),
            ("packing_bins", 1),
            ("epochs", 0),
            ("workers", 0),
            ("prefetch", 1),
        ):
            _whole_number(name, getattr(self, name), least)
        if not isinstance(self.eval_fraction, int | float) or not 0 < self.eval_fraction < 1:
            raise ValueError(
                f"config.data.eval_fraction={self.eval_fraction!r}: needs a share between 0 and 1, "
                "such as 0.05"
            )
        if self.source == "stdlib" and self.path:
            raise ValueError(
                f"config.data.path={self.path!r}: source 'stdlib' takes no path; to read your own "
                "data set config.data.source to one of " + ", ".join(SOURCES[1:])
            )
        if self.source != "stdlib" and not self.path:
            raise ValueError(
                f"config.data.path='': source {self.source!r} needs the path of a file or folder"
            )
        if self.source == "stdlib" and self.eval_path:
            raise ValueError(
                f"config.data.eval_path={self.eval_path!r}: source 'stdlib' holds out its own "
                "files; leave it empty"
            )
        if self.source in ("jsonl", "parquet") and not self.field:
            raise ValueError(
                f"config.data.field='': source {self.source!r} needs the name of the text's "
                + ("key" if self.source == "jsonl" else "column")
            )
        if not self.tokenizer:
            raise ValueError(
                "config.data.tokenizer='': needs 'bytes', the path of a tokenizer.json or of a "
                "SentencePiece .model"
            )


def _one_of(name: str, given: object, names: tuple[str, ...]) -> None:
    if given not in names:
        raise ValueError(f"config.data.{name}={given!r}: needs one of " + ", ".join(names))


def _whole_number(name: str, given: object, least: int) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise ValueError(f"config.data.{name}={given!r}: needs a whole number >= {least}")
