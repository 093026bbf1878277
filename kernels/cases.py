"""What cases of all kernels share: rows of segment ids, their numbers, and errors."""

import numpy as np


def ids_of(*rows) -> np.ndarray:
    """[B, T] from rows of (length, id), e.g. ids_of([(3, 7), (2, 0)]) = [[7, 7, 7, 0, 0]]."""
    return np.array([np.repeat([i for _, i in row], [n for n, _ in row]) for row in rows], np.int32)


def number(ids):
    """(index, first) of one row's segments, by a plain loop; see `kernels.segments.Segments`."""
    index, first, current, count = [], [], 0, 0
    for i in ids:
        starts = i != 0 and i != current
        count += starts
        current = i if i != 0 else current
        index.append(count - 1 if i != 0 else -1)
        first.append(starts)
    return np.array(index), np.array(first)


def error(x, reference) -> float:
    """RMS(x - reference) / RMS(reference); the absolute RMS where the reference is zero."""
    off = np.sqrt(np.mean(np.square(np.asarray(x, np.float64) - reference)))
    size = np.sqrt(np.mean(np.square(reference)))
    return float(off / size) if size > 0 else float(off)
