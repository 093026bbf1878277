"""Which checkpoints stay."""

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Retention:
    """The last `last` steps, multiples of `every` (0: none), and the `best` lowest scores.

    The newest step always stays.
    """

    last: int = 3
    every: int = 0
    best: int = 0

    def removes(self, scores: Mapping[int, float | None]) -> list[int]:
        """Steps that do not stay, ascending.

        Args:
            scores: of each step; lower is better. None: it has none. A score that is not finite is
                no score.
        """
        steps = sorted(scores)
        kept = set(steps[-max(self.last, 1) :])
        if self.every:
            kept |= {step for step in steps if step % self.every == 0}
        scored = {
            step: score for step, score in scores.items() if score is not None and finite(score)
        }
        # Of equal scores the later one stays.
        kept |= set(sorted(scored, key=lambda step: (scored[step], -step))[: self.best])
        return [step for step in steps if step not in kept]


def finite(score: object) -> bool:
    """Whether a score is a finite number."""
    return isinstance(score, int | float) and math.isfinite(score)
