"""Sums the counts of streams, and formats them for the log."""

import numpy as np

from data.packing import RECORD_SIZE, Record
from data.stream import Counts

# A larger share of broken documents is reported once, among at least this many documents.
_BROKEN_SHARE, _BROKEN_OF = 0.01, 100


def sum_counts(records: np.ndarray) -> dict[str, int]:
    """Sums records, [streams, n * RECORD_SIZE]: the names of `Counts`, `tokens` and `padding`."""
    parsed = [Record.from_ints(ints) for ints in records.reshape(-1, RECORD_SIZE)]
    totals = np.sum([record.counts for record in parsed], axis=0)
    return {
        **dict(zip(Counts._fields, (int(value) for value in totals))),
        "tokens": sum(record.tokens for record in parsed),
        "padding": sum(record.padding for record in parsed),
    }


def summary(split: str, counts: dict[str, int]) -> str:
    """Returns the counts in one line."""
    places = counts["tokens"] + counts["padding"]
    share = 100 * counts["padding"] / max(places, 1)
    return (
        f"data ({split}): {counts['documents']:,} documents, {counts['tokens']:,} tokens "
        f"and {share:.1f}% padding; skipped {counts['empty']:,} empty, {counts['broken']:,} "
        f"broken; {counts['invalid_utf8']:,} with invalid UTF-8, {counts['one_byte']:,} of one "
        f"byte, {counts['longer_than_row']:,} longer than a row"
    )


def broken_warning(split: str, counts: dict[str, int], described: str) -> str:
    """Returns a warning if more than 1 % of the documents so far are broken, else ""."""
    looked_at = Counts(**{name: counts[name] for name in Counts._fields}).looked_at
    if counts["broken"] <= _BROKEN_SHARE * max(looked_at, _BROKEN_OF):
        return ""
    return (
        f"data ({split}): {counts['broken']:,} of {looked_at:,} documents so far are broken or "
        f"null and skipped; check {described} and config.data.field"
    )
