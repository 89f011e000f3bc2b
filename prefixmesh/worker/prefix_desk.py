"""What the engine's core answers to commands about prefixes: pins, what is used most, and KV that is read and written.

It knows the cache, and who copies KV in and out of its pages; it computes nothing. The engine's loop calls it between two steps.
"""

from prefixmesh.worker.prefix_messages import PrefixAnswer, PrefixCommand


class PrefixDesk:
    """See the module."""

    def handle(self, command: PrefixCommand, now: float) -> PrefixAnswer:
        """Do what a command says, and answer it."""
        return PrefixAnswer(
            question=command.question, error="unsupported", problem="this cache keeps nothing by name"
        )
