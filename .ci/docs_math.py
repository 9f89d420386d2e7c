r"""A mkdocs hook that renders mathematics while the site is built: $x$ and $$x$$ become MathML.

MathML is understood by every current browser, so the pages need no script and work without a network.
"""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

# what pymdownx.arithmatex writes in its generic form
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\(?:\(|\[)(.*?)\\(?:\)|\])</\1>', re.DOTALL)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def mathml(match: re.Match[str]) -> str:
        tag, source = match[1], html.unescape(match[2]).strip()
        try:
            formula = convert(source, display="block" if tag == "div" else "inline")
        except Exception as error:
            raise PluginError(f"{page.file.src_uri}: cannot render the formula {source!r} ({error})") from error
        return f'<{tag} class="math">{formula}</{tag}>'

    return FORMULA.sub(mathml, content)
