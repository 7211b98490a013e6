"""Pages of docs/ as parts of the report."""

import os
import re
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markupsafe import Markup

from groupwise.analysis.table_formats import anchor


def to_html(text: str, page: Path, out: Path, prefix: str) -> tuple[Markup, Markup]:
    """Markdown as HTML, in two parts: up to the end of its first table, and the rest.

    The title is left out, headings go one level down, and their anchors begin with `prefix`. `page` is the file that
    links are relative to, `out` the file that they will stand in.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.add_render_rule("table_open", lambda *_: '<div class="wide" tabindex="0" role="group"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = _without_title(parser.parse(re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)))
    for place, token in enumerate(tokens):
        if token.type in ("heading_open", "heading_close"):
            if token.type == "heading_open":
                token.attrSet("id", f"{prefix}-{anchor(tokens[place + 1].content)}")
            token.tag = f"h{min(int(token.tag[1]) + 1, 6)}"
        for child in token.children or []:
            if child.type == "link_open":
                child.attrSet("href", _relative(str(child.attrGet("href")), page, out, prefix))
            elif child.type == "image":
                child.attrSet("src", _relative(str(child.attrGet("src")), page, out, prefix))
    end = next((place + 1 for place, token in enumerate(tokens) if token.type == "table_close"), len(tokens))
    parts = [parser.renderer.render(part, parser.options, {}) for part in (tokens[:end], tokens[end:])]
    return Markup(parts[0]), Markup(parts[1])


def _without_title(tokens: list[Any]) -> list[Any]:
    return tokens[3:] if tokens and tokens[0].tag == "h1" else tokens


def _relative(target: str, page: Path, out: Path, prefix: str) -> str:
    if re.match(r"[a-z]+:", target):
        return target
    if target.startswith("#"):
        return f"#{prefix}-{target[1:]}"
    path, mark, place = target.partition("#")
    return link(page.parent / path, out) + mark + place


def link(target: Path, out: Path) -> str:
    """A relative link from the page `out` to a file."""
    return Path(os.path.relpath(target, out.parent)).as_posix()
