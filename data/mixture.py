"""Several sources in one stream, in the shares that config.data.mixture asks for.

Every stream reads from every source, a document at a time, and has a position in each. The next
document is of the source that is the furthest below its share of the stream's tokens. So the choice
follows from the positions, whatever thread or process makes a row: a resumed run chooses alike, and
the shares are exact to a document or two. A source that has ended (config.data.epochs) leaves its
share to the others. (Grain's mixing chooses an element at a time, and its position is that of one
iterator over all sources; here positions belong to the rows of the batch.)
"""

import dataclasses

import numpy as np

from data.stream import Corpus, Piece, StreamReader


@dataclasses.dataclass(frozen=True)
class Mixture:
    """What all streams share: a corpus for each source. Pickled to worker processes.

    weights: the sources' shares of tokens, of any sum.
    """

    corpora: tuple[Corpus, ...]
    weights: tuple[float, ...] = (1.0,)

    @property
    def sequence_length(self) -> int:
        return self.corpora[0].sequence_length


class MixtureReader:
    """Reads a stream's documents, of all sources in turn.

    tokens: of each source, [sources] int64: those read so far. readers: where they continue.
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
        """As `StreamReader.take`, of the source whose turn it is; None when all have ended."""
        while not self._ended.all():
            number = self._current()
            if piece := self.readers[number].take(limit):
                self.tokens[number] += len(piece.table)
                return piece
            self._ended[number] = True
        return None

    def _current(self) -> int:
        """The source of the open document, or else of the next."""
        for number, reader in enumerate(self.readers):
            if reader.position.place:
                return number
        behind = self._weights * self.tokens.sum() - self.tokens
        # At the start nothing is behind, and the largest share begins.
        order = np.lexsort((-self._weights, -np.where(self._ended, -np.inf, behind)))
        return int(order[0])
