"""pdctl schema"""

import click

from pdctl.cli.common import print_json
from pdctl.spec import Spec


@click.command("schema")
def command() -> None:
    """Print the JSON Schema of a spec, for editors and other checkers."""
    schema = Spec.model_json_schema()
    print_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
