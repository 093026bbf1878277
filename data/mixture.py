"""Mixes several sources in each stream, with the shares of config.data.mixture.

Every stream reads from every source, one document at a time, and has a position in each. The next
document comes from the source that is furthest below its share of the stream's tokens. The choice
thus depends only on the positions, whatever thread or process produces a row: a resumed run makes
the same choices, and the shares are exact to within a document or two. A source that has ended
(config.data.epochs) leaves its share to the others. (Grain's mixing chooses one element at a time,
and its position is that of one iterator over all sources; here positions belong to the rows of the
batch.)
"""

import dataclasses

import numpy as np

from data.stream import Corpus, Piece, StreamReader


@dataclasses.dataclass(frozen=True)
class Mixture:
    """What all streams share: a corpus for each source. Pickled to worker processes.

    weights: the sources' relative shares of tokens.
    """

    corpora: tuple[Corpus, ...]
    weights: tuple[float, ...] = (1.0,)

    @property
    def sequence_length(self) -> int:
        return self.corpora[0].sequence_length


class MixtureReader:
    """Reads a stream's documents, from all sources.

    tokens: [sources] int64, the tokens read so far from each source. readers: one per source.
    """

    def __init__(self, mixture: Mixture, readers: list[StreamReader], tokens: list[int]):
        self._weights = np.asarray(mixture.weights) / sum(mixture.weights)
        self._ended = np.zeros(len(readers), bool)
        self.readers = readers
        self.tokens = np.asarray(tokens, np.int64)

    @property
    def inside(self) -> bool:
        """Whether the last document has more tokens."""
        return any(reader.position.place for reader in self.readers)

    def take(self, limit: int) -> Piece | None:
        """Like `StreamReader.take`, from the current source; None if all sources have ended."""
        while not self._ended.all():
            number = self._current()
            if piece := self.readers[number].take(limit):
                self.tokens[number] += len(piece.table)
                return piece
            self._ended[number] = True
        return None

    def _current(self) -> int:
        """The source of the open document, or else of the next document."""
        for number, reader in enumerate(self.readers):
            if reader.position.place:
                return number
        behind = self._weights * self.tokens.sum() - self.tokens
        # At the start no source is behind, so the one with the largest share comes first.
        order = np.lexsort((-self._weights, -np.where(self._ended, -np.inf, behind)))
        return int(order[0])
