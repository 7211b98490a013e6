"""Figures inside a page: SVG whose text is the page's and whose colours follow the page's."""

import re

from markupsafe import Markup

COLOURS = {
    "#000000": "currentColor",
    "#ffffff": "var(--page)",
    "#f3f3f3": "var(--shade)",
    "#e2e2e2": "var(--hatch)",
    "#d9d9d9": "var(--rule)",
    "#666666": "var(--muted)",
    "#999999": "var(--muted)",
    "#444444": "var(--dim)",
    "#0072b2": "var(--blue)",
    "#8fbbd9": "var(--pale)",
}
"""Colours of `figure_style` that a dark page changes."""
NARROW = 520
"""Pixels up to which a figure may shrink to the width of a phone; a wider one is scrolled instead..."""
LEAST = 560
"""... and is never narrower than this."""
FONT = "system-ui, 'DejaVu Sans', sans-serif"


def inline(svg: bytes, name: str, title: str) -> Markup:
    """The SVG of a figure as an element of a page, with an accessible name and ids that no other figure has."""
    text = svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(?<=\sid=")', f"{name}-", text)
    text = re.sub(r"(?<=url\(#)", f"{name}-", text)
    text = re.sub(r'(?<=href="#)', f"{name}-", text)
    for colour, variable in COLOURS.items():
        text = text.replace(colour, variable)
    text = text.replace("'DejaVu Sans'", FONT)
    width = re.search(r'<svg[^>]*? width="([0-9.]+)pt"', text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    natural = float(width[1]) / 0.75 if width else NARROW
    size = f"--width: {natural:.0f}px; --least: {LEAST if natural > NARROW else 0}px"
    start = f'<svg role="img" aria-label="{Markup.escape(title)}" style="{size}"'
    return Markup(re.sub(r"\n\s*", "\n", text.replace("<svg", start, 1)))
