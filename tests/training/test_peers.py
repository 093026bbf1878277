"""The line about another process's end; whole runs of several processes: test_processes.py."""

import pytest

from training import peers

# As jaxlib 0.12 prints them, cut to what matters.
SILENT = """E1201 05:14:44.640237 18639 coordination_service.cc:1518] Use error polling to \
propagate the following error to all tasks: UNAVAILABLE: The following tasks are unhealthy \
(stopped sending heartbeats):
1
3
The tasks have crashed. Check the task logs for an earlier error
F1201 05:14:44 20671 client.h:86] Terminating process because the JAX distributed service detected \
fatal errors.
"""
LEADER = """F1201 05:14:29.943558 17681 client.h:86] Terminating process because the JAX \
distributed service detected fatal errors. absl::Status: UNAVAILABLE: Failed to send RPC to \
coordination service. Either the leader task was preempted/died/restarted unexpectedly
"""
TWICE = """E1201 05:17:21.053495 20664 coordination_service.cc:518] [249] 1 unexpectedly tried to \
connect with a different incarnation. It has likely restarted.
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (SILENT, "process 1 and process 3 died or did not answer for 10 s"),
        (LEADER, "process 0 has died"),
        (TWICE, "a second process was started with --process_id=1"),
        ("F1201 client.h:86] Terminating process", "another process has died or cannot be reached"),
    ],
)
def test_the_cause_names_the_process(text, cause):
    assert peers.cause_of(text) == cause
