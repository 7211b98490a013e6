"""The page in headless Chromium: it fits a phone and a desktop, is dark where asked, and prints."""

import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest
from PIL import Image

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on the PATH")]
FRAME = """<!doctype html><title>waiting</title>
<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{page}"></iframe>
<script>const frame = document.querySelector("iframe");
frame.onload = () => {{ const inside = frame.contentWindow;
document.title = [inside.document.documentElement.scrollWidth, inside.innerWidth,
inside.performance.getEntriesByType("resource").length].join(" ") }}</script>"""
"""Chromium has no window narrower than 500 pixels; a frame of a page may be as narrow as a phone."""


@pytest.fixture
def page(rendered, tmp_path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(rendered[0])
    return path


def browse(page: Path, *options: str) -> str:
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_nothing_is_wider_than_the_window(page, width):
    """Wide tables and figures scroll inside their own frame; and nothing is loaded."""
    page.write_text(FRAME.format(width=width, page=escape(page.read_text())))
    title = re.search(r"<title>([0-9]+) ([0-9]+) ([0-9]+)</title>", browse(page, "--dump-dom"))
    assert title is not None
    wide, window, loaded = map(int, title.groups())
    assert window == width and wide <= window
    assert loaded == 0


def mean(page: Path, *options: str) -> float:
    """Mean brightness of a picture of the page's top, from 0 to 255."""
    picture = page.with_suffix(".png")
    browse(page, "--window-size=800,1200", f"--screenshot={picture}", *options)
    grey = Image.open(picture).convert("L").histogram()
    return sum(value * number for value, number in enumerate(grey)) / sum(grey)


def test_it_follows_the_colour_scheme(page):
    assert mean(page, "--blink-settings=preferredColorScheme=1") > 200
    assert mean(page, "--blink-settings=preferredColorScheme=0") < 60


def test_it_prints(page):
    paper = page.with_suffix(".pdf")
    browse(page, "--no-pdf-header-footer", f"--print-to-pdf={paper}")
    assert paper.read_bytes().startswith(b"%PDF") and paper.stat().st_size > 50_000
