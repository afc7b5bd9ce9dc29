"""Legs -> files, through the templates. Pure: the same deployment gives the same bytes."""

import shlex
from dataclasses import dataclass

import jinja2

from pdctl.plan import NONCE, Deployment, Leg, kv_config_json


@dataclass(frozen=True)
class File:
    name: str
    text: str
    executable: bool = True


def render(deployment: Deployment) -> list[File]:
    """One script per leg, and ``cleanup.sh``."""
    scripts = [File(f"{leg.name}.sh", render_leg(leg)) for leg in deployment.legs]
    cleanup = template("cleanup.sh.j2").render(deployment=deployment, q=quote)
    return [*scripts, File("cleanup.sh", cleanup)]


def render_leg(leg: Leg) -> str:
    """The start script of one leg."""
    name = "router.sh.j2" if leg.role == "router" else "engine.sh.j2"
    return template(name).render(
        leg=leg, q=quote, words=_words, comment=_comment, kv_config=_kv_config(leg)
    )


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
