"""The playbooks as HTML pages, as Prometheus serves them below ``/consoles/``.

It runs what lies in its console folder through Go's templates.
"""

import re
from collections.abc import Iterator

from markdown_it import MarkdownIt

from pdctl.runbook import Playbook, playbooks


def pages() -> Iterator[tuple[str, str, str]]:
    """Slug, title and HTML body of every playbook."""
    names = {page.name: f"{page.slug}.html" for page in playbooks()}
    for page in playbooks():
        yield page.slug, page.title, _body(page, names)


def _body(page: Playbook, names: dict[str, str]) -> str:
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    body = str(markdown.render(page.body))
    # Pages link to each other's files.
    body = re.sub(
        r'href="([^"#:]+\.md)"', lambda match: f'href="{names.get(match[1], match[1])}"', body
    )
    # Go's templates would take {{ for their own.
    return body.replace("{{", "&#123;&#123;")
