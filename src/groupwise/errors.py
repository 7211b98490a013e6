"""The one exception that stands for a user's mistake."""


class UserError(ValueError):
    """A mistake in what the user gave: one sentence saying what was given, what was expected and how to mend it.

    `run.py` prints the sentence and leaves with exit code 2; libraries see an ordinary ``ValueError``.
    """


def reason(error: BaseException, most: int = 200) -> str:
    """What a library says went wrong, on one line and short enough to stand in brackets in a sentence of ours."""
    if isinstance(error, MemoryError):
        return "it takes more memory than there is"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = (lines or [type(error).__name__])[0].rstrip(".:")
    return _printable(first if len(first) <= most else first[:most] + "...")


def told(error: BaseException, most: int = 500) -> str:
    """The sentence of a mistake for a terminal: one line, nothing unprintable, a long one without its middle."""
    text = _printable(" ".join(str(error).split()))
    return text if len(text) <= most else f"{text[: most - 200]} ... {text[-195:]}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


class ProcessFailed(RuntimeError):
    """One of a run's processes died or hit a bug: one sentence on which and how; `run.py` leaves with exit code 1."""
