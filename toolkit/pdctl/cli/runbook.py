"""pdctl runbook"""

import sys

import click

from pdctl.cli.common import print_json
from pdctl.runbook import Playbook, find, playbooks, search, symptom_index

MOST_MATCHES = 8


@click.command("runbook")
@click.argument("query", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the pages as JSON.")
@click.option("--index", is_flag=True, help="Print all symptoms with their pages, as Markdown.")
def command(query: tuple[str, ...], as_json: bool, index: bool) -> None:
    """Show the page of a finding CODE or an ALERT, or the pages that fit a symptom: words, or a
    line of a log. Without QUERY: all pages.

    Exit code 1: no page fits.
    """
    words = " ".join(query).strip()
    if index:
        click.echo(symptom_index(), nl=False)
        return
    if not words:
        _show_list(list(playbooks()), as_json)
        return
    page = find(words)
    if page is not None:
        _show_page(page, as_json)
        return
    matches = search(words)
    if not matches:
        click.echo(f"no playbook fits {words!r}; all of them: pdctl runbook", err=True)
        sys.exit(1)
    if as_json:
        print_json([{**_facts(each.playbook), "symptom": each.symptom} for each in matches])
        return
    for each in matches[:MOST_MATCHES]:
        symptom = f"  ({each.symptom})" if each.symptom else ""
        click.echo(f"{each.playbook.code}  {each.playbook.title}{symptom}")
    click.echo(f"\npdctl runbook {matches[0].playbook.code}")


def _show_page(page: Playbook, as_json: bool) -> None:
    if as_json:
        print_json({**_facts(page), "body": page.body})
    elif sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415 (only a terminal needs it)
        from rich.markdown import Markdown  # noqa: PLC0415

        click.echo(f"{page.code}  {page.category}  {page.severity}")
        Console().print(Markdown(page.body))
    else:
        click.echo(f"{page.code}  {page.category}  {page.severity}\n\n{page.body}", nl=False)


def _show_list(pages: list[Playbook], as_json: bool) -> None:
    if as_json:
        print_json([_facts(page) for page in pages])
        return
    category = ""
    for page in sorted(pages, key=lambda each: (each.category, each.code)):
        if page.category != category:
            category = page.category
            click.echo(f"{category}:")
        click.echo(f"  {page.code}  {page.title}")


def _facts(page: Playbook) -> dict[str, object]:
    return {
        "code": page.code,
        "title": page.title,
        "category": page.category,
        "severity": page.severity,
        "alerts": list(page.alerts),
        "symptoms": list(page.symptoms),
    }
