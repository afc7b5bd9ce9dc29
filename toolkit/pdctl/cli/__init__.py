"""What the operator types: one file per command, imported when it is called."""

import importlib
import sys

import click

from pdctl.errors import PdctlError

COMMANDS = {
    "validate": "Check a spec and list everything wrong with it.",
    "schema": "Print the JSON Schema of a spec.",
    "render": "Write the start script of every leg, and cleanup.sh.",
    "up": "Start a deployment's legs on this machine and wait until they are healthy.",
    "status": "Show the legs of a deployment.",
    "logs": "Print a leg's log.",
    "doctor": "Say what is wrong with a deployment, on what evidence, and what to do.",
    "runbook": "Show what to do about a finding, an alert or a symptom.",
    "collect": "Gather the evidence of a deployment into one file.",
    "verify": "Prove that a turn's KV really comes back from decode.",
    "demo": "Hold one conversation with bidirectional transfer on and off, side by side.",
    "bench": "Measure what bidirectional transfer is worth, off against on.",
    "report": "Show what a benchmark run found, and whether its evidence carries it.",
    "tune": "Recommend recompute_threshold and decode_ttl from measurements.",
    "down": "Stop a deployment.",
    "observe": "Run Prometheus and Alertmanager for a deployment; draw a report.",
    "dashboards": "Build, check and push Grafana dashboards.",
    "trace": "Show a turn's trace as a waterfall.",
    "canary": "Make the small test model whose answers show one wrong KV block.",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"pdctl.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pdctl")
def cli() -> None:
    """Run multi-turn agents on vLLM with prefill/decode disaggregation and bidirectional NIXL
    KV transfer.

    Exit codes: 0 done, 1 it failed, 2 wrong use or wrong spec, 130 interrupted.
    """


def main() -> None:
    """The console script."""
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Exit as done:
        code = done.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = 130
    except PdctlError as error:
        click.echo(str(error), err=True)
        code = error.code
    except OSError as error:
        click.echo(f"{error.filename or 'pdctl'}: {error.strerror or error}", err=True)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)
