"""Tasks by their names in config.data.source (also listed in data/options.py)."""

from data.tasks import ledger, palindrome, recall, stack
from data.tasks.task import Write

TASKS: dict[str, Write] = {
    "ledger": ledger.write,
    "recall": recall.write,
    "palindrome": palindrome.write,
    "stack": stack.write,
}
