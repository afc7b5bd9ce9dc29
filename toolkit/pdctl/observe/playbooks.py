"""The playbook pages that alerts and panels link to, as Prometheus serves them.

A playbook is a Markdown file ``PD####-SLUG.md`` with front matter. Prometheus serves what lies in
its console folder below ``/consoles/``, after running it through Go's templates.
"""

import importlib.resources
import re
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from importlib.abc import Traversable

_NAME = re.compile(r"PD[0-9]+-(.+)\.md")
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


def find(slug: str) -> "Traversable | None":
    """The playbook of an alert's slug, or None."""
    return _all().get(slug)


def page(slug: str) -> tuple[str, str] | None:
    """Title and HTML body of a playbook, or None when there is none."""
    file = find(slug)
    if file is None:
        return None
    text = _FRONT_MATTER.sub("", file.read_text(encoding="utf-8"))
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    heading = re.search(r"^# +(.+)$", text, re.MULTILINE)
    # Go's templates would take {{ for their own.
    return (heading[1] if heading else slug), body.replace("{{", "&#123;&#123;")


def _all() -> "dict[str, Traversable]":
    try:
        files = list(importlib.resources.files("pdctl.playbooks").iterdir())
    except ModuleNotFoundError:
        return {}
    named = ((_NAME.fullmatch(file.name), file) for file in files)
    return {match[1]: file for match, file in named if match}
