"""pdctl canary"""

from pathlib import Path

import click

from pdctl.canary import TokenizerKind, make_canary


@click.command("canary")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--tokenizer",
    type=click.Choice(["character", "bpe"]),
    default="character",
    help="bpe splits generated text differently than it was generated, as real ones may.",
)
def command(folder: Path, tokenizer: TokenizerKind) -> None:
    """Make the canary model in FOLDER: a tiny random model whose answers show one wrong KV block.

    Needs the engine's Python (torch and transformers). An existing folder is left as it is.
    """
    if (folder / "config.json").is_file():
        click.echo(f"{folder}: is there already")
        return
    make_canary(folder, tokenizer)
    click.echo(f"{folder}: made")
