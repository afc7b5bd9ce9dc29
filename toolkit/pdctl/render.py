"""Legs -> files, through the templates. Pure: the same deployment gives the same bytes."""

import json
import shlex
from dataclasses import dataclass

import jinja2

from pdctl.plan import NONCE, Deployment, Leg, kv_config_json

ROUTER_CONFIG = "router.json"


@dataclass(frozen=True)
class File:
    name: str
    text: str
    executable: bool = True


def render(deployment: Deployment) -> list[File]:
    """The files of every leg, and ``cleanup.sh``."""
    files = [file for leg in deployment.legs for file in leg_files(leg)]
    cleanup = template("cleanup.sh.j2").render(deployment=deployment, q=quote)
    return [*files, File("cleanup.sh", cleanup)]


def leg_files(leg: Leg) -> list[File]:
    """What a leg needs to start: its script, and the router's config file."""
    name = "router.sh.j2" if leg.role == "router" else "engine.sh.j2"
    script = template(name).render(
        leg=leg, q=quote, words=_words, comment=_comment, kv_config=_kv_config(leg)
    )
    files = [File(f"{leg.name}.sh", script)]
    if leg.config:
        text = json.dumps(leg.config, indent=2, ensure_ascii=False) + "\n"
        files.append(File(ROUTER_CONFIG, text, executable=False))
    return files


def quote(text: str) -> str:
    """One shell word that stands for exactly this text; a leading ``~/`` means ``$HOME``."""
    if text == "~":
        return '"$HOME"'
    if text.startswith("~/"):
        return '"$HOME"/' + shlex.quote(text[2:])
    return shlex.quote(text)


def _words(words: tuple[str, ...]) -> str:
    return " ".join(map(quote, words))


def _comment(text: str) -> str:
    return " ".join(text.split())


def _kv_config(leg: Leg) -> str:
    """The JSON as shell text in which ``$nonce`` is filled in at the start."""
    return '"$nonce"'.join(f"'{part}'" for part in kv_config_json(leg).split(NONCE))


def template(name: str) -> jinja2.Template:
    """A template of ``templates/``."""
    return _ENVIRONMENT.get_template(name)


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("pdctl.templates", ""),
    undefined=jinja2.StrictUndefined,
    autoescape=False,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
