"""The one exception that stands for a user's mistake."""


class UserError(ValueError):
    """A mistake in what the user gave: one sentence saying what was given, what was expected and how to mend it.

    `run.py` prints the sentence and leaves with exit code 2; libraries see an ordinary ``ValueError``.
    """
