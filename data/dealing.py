"""Who reads what, when: documents dealt to streams.

The rule depends on the seed, the epoch and the documents' sizes alone, so every host works out the
same deal and then reads only the documents of its own rows.

1. An epoch's order is a shuffle of all documents, reseeded each epoch. It is dealt in hands of at
   most HAND documents, so that neither the start of a run nor a resumed one waits for more than one
   hand, however large the corpus. (The shuffle is NumPy's: grain's, which finds one place at a time
   without a table, takes 10 us a place in a large corpus and 10 ms in one of three documents; a
   table of 100 million places takes NumPy seconds and 0.8 GB.)
2. A hand's documents go to streams largest first, each to the stream with the fewest bytes so far.
   "Largest" is by size class (powers of two); inside a class the epoch's order decides, so the
   company a document keeps changes every epoch. Giving out the small ones last leaves the streams
   within a few small documents of each other; dealing document j to stream j mod rows would leave
   them apart by the largest ones.
3. A stream reads what it was dealt in the epoch's order, then goes on with the next hand.

So nothing is padded between epochs, and each stream reads epoch e's documents before those of
e + 1. After the last epoch streams that end early are padded until the longest ends. A stream may
be dealt nothing in a hand (an epoch's last, or fewer documents than rows) and then goes straight on
to the next. Of the latter kind all hands would be alike, and all streams soon be in lockstep, so
make_loader refuses an endless training of fewer documents than rows.

Sizes are only there to balance: bytes, or an estimate where the format hides them.

When a run goes on with another number of streams, what is left of the hands in play is dealt anew,
documents begun included: those go on where they were left.
"""

import heapq
from typing import Any, NamedTuple

import numpy as np

# Documents dealt at a time: about 0.1 s of dealing, and far more than the rows of any batch.
HAND = 65_536


class Position(NamedTuple):
    """Where a stream stands: all that is needed to go on with its next token."""

    hand: int = 0
    ordinal: int = 0  # document, among those dealt to the stream in this hand
    byte: int = 0  # where the block being read starts in the document
    token: int = 0  # tokens of the block already read
    place: int = 0  # tokens of the document already read
    invalid: int = 0  # 1 once a block of the document was no valid UTF-8


class Dealer:
    """Deals the documents 0 .. len(sizes) - 1 to `streams` streams, hand by hand.

    Hands are numbered through: hand h is part of epoch h // hands_per_epoch.

    epochs: how many there are; 0 for no end. shuffle: False keeps the documents' own order, as
    evaluation does. earlier: what a run with other streams had read, as `Earlier.to_json` gives it.
    """

    # Streams drift apart by few hands, so few are ever needed at a time.
    _KEPT = 8

    def __init__(
        self,
        sizes: np.ndarray,
        *,
        streams: int,
        seed: int,
        epochs: int,
        shuffle: bool,
        earlier: dict[str, Any] | None = None,
    ):
        self._sizes = np.asarray(sizes, np.int64)
        self._streams = streams
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._earlier = earlier and Earlier(self._sizes, shuffle, earlier)
        self._dealt: dict[int, list[np.ndarray]] = {}
        self._shuffled: dict[int, np.ndarray] = {}  # by epoch
        self._hands_per_epoch = -(-len(self._sizes) // HAND)

    def __getstate__(self) -> dict[str, Any]:
        """A worker process deals for itself rather than be sent the tables."""
        return {**self.__dict__, "_dealt": {}, "_shuffled": {}}

    @property
    def first_hand(self) -> int:
        """Where streams begin."""
        return self._earlier.first_hand if self._earlier else 0

    def documents(self, stream: int, hand: int) -> np.ndarray | None:
        """Returns the documents [n] that a stream reads in a hand, in order.

        None after the last epoch.
        """
        if self._epochs and hand >= self._epochs * self._hands_per_epoch:
            return None
        if hand not in self._dealt:
            self._dealt[hand] = self._deal(hand)
            if len(self._dealt) > self._KEPT:
                del self._dealt[next(iter(self._dealt))]
        return self._dealt[hand][stream]

    def start(self, hand: int, document: int) -> Position | None:
        """Returns where to begin a document that earlier streams had begun; else None."""
        return self._earlier.start(hand, document) if self._earlier else None

    def order(self, hand: int) -> np.ndarray:
        """Returns the documents to deal in a hand, in the order of its epoch."""
        if self._earlier and hand <= self._earlier.last_hand:
            return self._earlier.left(hand)
        count = len(self._sizes)
        epoch, part = divmod(hand, self._hands_per_epoch)
        places = slice(part * HAND, (part + 1) * HAND)
        if not self._shuffle:
            return np.arange(count)[places]
        if epoch not in self._shuffled:
            generator = np.random.default_rng([self._seed, epoch])
            self._shuffled[epoch] = generator.permutation(count)
            if len(self._shuffled) > 2:
                del self._shuffled[next(iter(self._shuffled))]
        return self._shuffled[epoch][places]

    def _deal(self, hand: int) -> list[np.ndarray]:
        order = self.order(hand)
        # Equal loads are common (all are 0 at first); who wins a tie changes with the hand.
        ties = np.random.default_rng([self._seed, hand, 1]).permutation(self._streams)
        loads = [(0, tie, int(stream)) for tie, stream in enumerate(ties)]
        sizes = self._sizes[order]
        largest_first = np.argsort(-np.frexp(sizes.astype(np.float64))[1], kind="stable")
        stream_of = np.empty(len(order), np.int64)
        for place in largest_first:
            load, tie, stream = loads[0]
            stream_of[place] = stream
            heapq.heapreplace(loads, (load + int(sizes[place]) + 1, tie, stream))
        return [order[stream_of == stream] for stream in range(self._streams)]


class Earlier:
    """How far streams of another number, or dealt by another seed, had read."""

    def __init__(self, sizes: np.ndarray, shuffle: bool, saved: dict[str, Any]):
        self._positions = [Position(*ints) for ints in saved["positions"]]
        self._dealer = Dealer(
            sizes,
            streams=len(self._positions),
            seed=saved["seed"],
            epochs=0,
            shuffle=shuffle,
            earlier=saved["earlier"],
        )
        self.first_hand = min(position.hand for position in self._positions)
        # The last hand that is not dealt whole, be it because of streams earlier still.
        self.last_hand = max(position.hand for position in self._positions)
        if self._dealer._earlier:
            self.last_hand = max(self.last_hand, self._dealer._earlier.last_hand)

    @staticmethod
    def to_json(
        positions: list[list[int]], seed: int, earlier: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Returns what to hand a new Dealer; `earlier` is what the old one had been handed."""
        return {"positions": positions, "seed": seed, "earlier": earlier}

    def left(self, hand: int) -> np.ndarray:
        """Returns the documents of a hand that were not read to their end, in order."""
        read = [self._read(stream, hand) for stream in range(len(self._positions))]
        order = self._dealer.order(hand)
        return order[~np.isin(order, np.concatenate(read))]

    def _read(self, stream: int, hand: int) -> np.ndarray:
        position = self._positions[stream]
        dealt = self._dealer.documents(stream, hand)
        assert dealt is not None  # this dealer has no last epoch
        if hand == position.hand:
            return dealt[: position.ordinal]
        return dealt if hand < position.hand else dealt[:0]

    def start(self, hand: int, document: int) -> Position | None:
        """Returns where a document was left; None if it had not been begun."""
        for stream, position in enumerate(self._positions):
            if position.hand == hand and position.place:
                dealt = self._dealer.documents(stream, hand)
                if dealt is not None and dealt[position.ordinal] == document:
                    return position
        return self._dealer.start(hand, document)
