"""The one exception that stands for a user's mistake."""


class UserError(ValueError):
    """A mistake in what the user gave: one sentence saying what was given, what was expected and how to mend it.

    `run.py` prints the sentence and leaves with exit code 2; libraries see an ordinary ``ValueError``.
    """


class ProcessFailed(RuntimeError):
    """One of a run's processes died or hit a bug: one sentence on which and how; `run.py` leaves with exit code 1."""
