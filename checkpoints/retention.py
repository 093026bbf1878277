"""Which checkpoints are kept."""

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Retention:
    """Keeps the last `last` steps, multiples of `every` (0: none), and the `best` lowest scores.

    The newest step is always kept.
    """

    last: int = 3
    every: int = 0
    best: int = 0

    def removes(self, scores: Mapping[int, float | None]) -> list[int]:
        """Returns the steps to remove, ascending.

        Args:
            scores: score of each step; lower is better. None: no score. A score that is not finite
                counts as None.
        """
        steps = sorted(scores)
        kept = set(steps[-max(self.last, 1) :])
        if self.every:
            kept |= {step for step in steps if step % self.every == 0}
        scored = {
            step: score for step, score in scores.items() if score is not None and finite(score)
        }
        # Of equal scores the later step is kept.
        kept |= set(sorted(scored, key=lambda step: (scored[step], -step))[: self.best])
        return [step for step in steps if step not in kept]


def finite(score: object) -> bool:
    """Whether a score is a finite number."""
    return isinstance(score, int | float) and math.isfinite(score)
