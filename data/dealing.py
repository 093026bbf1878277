"""Who reads what, when: documents dealt to streams.

The rule depends on the seed, the epoch and the documents' sizes alone, so every host works out the
same deal and then reads only the documents of its own rows.

1. An epoch's order is a shuffle of all documents (grain's, reseeded each epoch). It is dealt in
   hands of at most HAND documents, so that neither the start of a run nor a resumed one waits for
   more than one hand, however large the corpus.
2. A hand's documents go to streams largest first, each to the stream with the fewest bytes so far.
   "Largest" is by size class (powers of two); inside a class the epoch's order decides, so the
   company a document keeps changes every epoch. Giving out the small ones last leaves the streams
   within a few small documents of each other; dealing document j to stream j mod rows would leave
   them apart by the largest ones.
3. A stream reads what it was dealt in the epoch's order, then goes on with the next hand.

So nothing is padded between epochs, and each stream reads epoch e's documents before those of
e + 1. After the last epoch streams that end early are padded until the longest ends. A stream may
be dealt nothing in a hand (fewer documents than rows) and then goes straight on to the next.

Sizes are only there to balance: bytes, or an estimate where the format hides them.
"""

import heapq

import grain
import numpy as np

# Documents dealt at a time: about 0.7 s of dealing, and far more than the rows of any batch.
HAND = 65_536


class Dealer:
    """Deals the documents 0 .. len(sizes) - 1 to `streams` streams, hand by hand.

    Hands are numbered through: hand h is part of epoch h // hands_per_epoch.

    epochs: how many there are; 0 for no end. shuffle: False keeps the documents' own order, as
    evaluation does.
    """

    # Streams drift apart by few hands, so few are ever needed at a time.
    _KEPT = 8

    def __init__(self, sizes: np.ndarray, *, streams: int, seed: int, epochs: int, shuffle: bool):
        self._sizes = np.asarray(sizes, np.int64)
        self._streams = streams
        self._seed = seed
        self._shuffle = shuffle
        self._dealt: dict[int, list[np.ndarray]] = {}
        self._epochs = epochs
        self.hands_per_epoch = -(-len(self._sizes) // HAND)

    def documents(self, stream: int, hand: int) -> np.ndarray | None:
        """Returns the documents [n] that a stream reads in a hand, in order.

        None after the last epoch.
        """
        if self._epochs and hand >= self._epochs * self.hands_per_epoch:
            return None
        if hand not in self._dealt:
            self._dealt[hand] = self._deal(hand)
            if len(self._dealt) > self._KEPT:
                del self._dealt[min(self._dealt)]
        return self._dealt[hand][stream]

    def order(self, hand: int) -> np.ndarray:
        """Returns the documents of a hand in the order of its epoch."""
        count = len(self._sizes)
        epoch, part = divmod(hand, self.hands_per_epoch)
        places = range(part * HAND, min((part + 1) * HAND, count))
        if not self._shuffle:
            return np.asarray(places, np.int64)
        # Grain numbers the elements of a repeated dataset through its epochs.
        shuffled = grain.MapDataset.range(count).seed(self._seed).shuffle().repeat()
        return np.fromiter((shuffled[epoch * count + i] for i in places), np.int64, len(places))

    def _deal(self, hand: int) -> list[np.ndarray]:
        order = self.order(hand)
        # Equal loads are common (all are 0 at first); who wins a tie changes with the hand.
        ties = np.random.default_rng([self._seed, hand]).permutation(self._streams)
        loads = [(0, tie, int(stream)) for tie, stream in enumerate(ties)]
        sizes = self._sizes[order]
        largest_first = np.argsort(-np.frexp(sizes.astype(np.float64))[1], kind="stable")
        stream_of = np.empty(len(order), np.int64)
        for place in largest_first:
            load, tie, stream = loads[0]
            stream_of[place] = stream
            heapq.heapreplace(loads, (load + int(sizes[place]) + 1, tie, stream))
        return [order[stream_of == stream] for stream in range(self._streams)]
