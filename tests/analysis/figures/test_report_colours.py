"""Text of the page can be read on its background, in the light, in the dark and on paper (WCAG AA: 4.5 to 1)."""

import re
from importlib.resources import files

import pytest

from groupwise.analysis.statistics import STATUSES

PAIRS = [
    ("ink", "page"),
    ("muted", "page"),
    ("muted", "shade"),
    ("muted", "hatch"),
    ("ink", "hatch"),
    ("link", "page"),
    ("good", "good-soft"),
    ("bad", "bad-soft"),
    ("wait", "wait-soft"),
    ("ink", "soft"),
]


def schemes() -> dict[str, dict[str, str]]:
    text = (files("groupwise.analysis.report") / "report.css").read_text()
    blocks = [
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{3,6})", block)) for block in re.findall(r":root \{([^}]*)\}", text)
    ]
    light, dark, paper = blocks
    return {"light": light, "dark": light | dark, "paper": light | paper}


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark", "paper"])
@pytest.mark.parametrize(("above", "below"), PAIRS)
def test_contrast(scheme, above, below):
    colours = schemes()[scheme]
    low, high = sorted(luminance(colours[name]) for name in (above, below))
    assert (high + 0.05) / (low + 0.05) >= 4.5


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_has_a_look(status):
    text = (files("groupwise.analysis.report") / "report.css").read_text()
    assert f".st-{status.replace(' ', '-')} {{" in text or f".st-{status.replace(' ', '-')}, " in text
