"""Tasks by their names in config.data.source (data/options.py lists them too)."""

from data.tasks import ledger, palindrome, recall, stack
from data.tasks.task import Write

TASKS: dict[str, Write] = {
    "ledger": ledger.write,
    "recall": recall.write,
    "palindrome": palindrome.write,
    "stack": stack.write,
}
