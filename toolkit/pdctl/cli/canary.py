"""pdctl canary"""

from pathlib import Path

import click

from pdctl.canary import make_canary


@click.command("canary")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def command(folder: Path) -> None:
    """Make the canary model in FOLDER: a tiny random model whose answers show one wrong KV block.

    Needs the engine's Python (torch and transformers). An existing folder is left as it is.
    """
    if (folder / "config.json").is_file():
        click.echo(f"{folder}: is there already")
        return
    make_canary(folder)
    click.echo(f"{folder}: made")
