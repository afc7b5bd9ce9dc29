"""From the options of ``pdctl bench`` to a run."""

import os
import shlex
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pdctl.bench.adapters.run import Foreign, run_foreign
from pdctl.bench.arms import Arm, arms_named
from pdctl.bench.client import Target
from pdctl.bench.engines import EngineLeg
from pdctl.bench.places import Place, UrlPlace
from pdctl.bench.records import RunFolder, load_run
from pdctl.bench.run import Options, Runner, Say, new_settings
from pdctl.bench.trace import trace
from pdctl.bench.workload import (
    DEFAULT_LENGTHS,
    QUICK_LENGTHS,
    Load,
    Workload,
    agentic,
    longest_target,
    sweep,
)
from pdctl.cli.bench_place import about_spec, deployment_place
from pdctl.cli.common import read_spec
from pdctl.cli.progress import Progress
from pdctl.errors import PdctlError
from pdctl.spec import Loaded

KEY_VARIABLE = "PDCTL_API_KEY"
"""Environment variable with the bearer token for the URL, if it wants one."""

_QUICK_ANSWER, _QUICK_REPEATS = 16, 3
_ANSWER, _REPEATS = 32, 5


@dataclass(frozen=True)
class Asked:
    """The options as they were given; see ``pdctl bench --help``."""

    spec: Path | None
    quick: bool
    lengths: str | None
    shape: Any
    new_tokens: int
    answer_tokens: int | None
    trace: Path | None
    agentic: int | None
    turns: int
    system_tokens: int
    gap: float
    arms: str | None
    repeats: int | None
    rounds: int
    concurrency: int
    rate: float | None
    seed: str | None
    endpoint: str
    client: str
    urls: tuple[str, ...]
    model: str | None
    session_header: str | None
    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    tokenizer: Path | None
    no_salt: bool
    age: bool | None
    attach: bool
    keep: bool
    resume: bool
    deadline: float | None
    error_budget: float
    timeout: float
    program: Path | None
    stats_json_output: Path | None
    out: Path | None
    as_json: bool


def run_own_client(asked: Asked, folder: Path, progress: Progress) -> None:
    """Measure with pdctl's client, on a deployment or on URLs.

    Raises:
        PdctlError: wrong options (exit code 2), or the run cannot go on.
    """
    loaded = read_spec(asked.spec) if asked.spec else None
    if (loaded is None) == (asked.client != "http"):
        raise PdctlError("give either a SPEC, or --client http with --url", 2)
    out, seed = _folder(asked, folder)
    workload = _workload(asked, seed, loaded)
    targets = _targets(asked) if loaded is None else {}
    arms = [Arm(name, url=target.url) for name, target in targets.items()] or _arms(asked)
    options = Options(
        workload=workload,
        arms=arms,
        repeats=asked.repeats or (_QUICK_REPEATS if asked.quick else _REPEATS),
        seed=seed,
        endpoint=asked.endpoint,
        rounds=asked.rounds,
        error_share=asked.error_budget,
        age=_ages(asked, loaded),
        deadline_s=asked.deadline,
        salt=not asked.no_salt,
        tokenizer=asked.tokenizer,
        command=shlex.join(["pdctl", *sys.argv[1:]]),
        extra=about_spec(loaded),
    )
    settings = _settings(asked, out, options, loaded)
    place: Place = UrlPlace(targets, _engine_urls(asked))
    if loaded is not None and asked.spec is not None:
        place = deployment_place(
            loaded, asked.spec.parent, asked.timeout, progress, asked.attach, asked.keep
        )
    try:
        Runner(options, place, out, progress.say).go(settings)
    except ConnectionError as error:
        raise PdctlError(f"the deployment went away: {error}") from None


def _folder(asked: Asked, folder: Path) -> tuple[RunFolder, str]:
    """The run's folder and its seed."""
    out = RunFolder(folder)
    if asked.resume:
        if asked.out is None:
            raise PdctlError("--resume needs --out FOLDER", 2)
        seed = str(load_run(folder).settings["seed"])
        out.drop_unfinished()
        return out, asked.seed or seed
    return out, asked.seed or uuid.uuid4().hex[:10]


def _settings(
    asked: Asked, out: RunFolder, options: Options, loaded: Loaded | None
) -> dict[str, Any]:
    name = loaded.spec.name if loaded else None
    settings = new_settings(options, name)
    if not asked.resume:
        text = asked.spec.read_text(encoding="utf-8") if asked.spec else None
        out.create(settings, text)
        return settings
    begun = load_run(out.folder).settings
    for key in ("arms", "seed", "endpoint", "workload", "repeats"):
        if begun[key] != settings[key]:
            raise PdctlError(f"--resume: the run in {out.folder} has another {key}", 2)
    return begun | {"resumed": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def _workload(asked: Asked, seed: str, loaded: Loaded | None) -> Workload:
    load = Load(asked.concurrency, asked.rate)
    answer = asked.answer_tokens or (_QUICK_ANSWER if asked.quick else _ANSWER)
    if asked.trace and asked.agentic:
        raise PdctlError("--trace and --agentic exclude each other", 2)
    if asked.trace:
        return trace(asked.trace, asked.answer_tokens, seed, load)
    if asked.agentic:
        return agentic(
            asked.agentic, asked.turns, asked.system_tokens, answer, seed, load, asked.gap
        )
    lengths: tuple[int, ...] = QUICK_LENGTHS if asked.quick else DEFAULT_LENGTHS
    if asked.lengths:
        lengths = _lengths(asked.lengths)
    elif loaded is not None:
        fit = loaded.spec.model.max_model_len - answer
        lengths = tuple(length for length in lengths if length <= fit)
    workload = sweep(lengths, answer, asked.new_tokens, asked.shape, load)
    longest = longest_target(workload) or 0
    if loaded is not None and longest > loaded.spec.model.max_model_len:
        raise PdctlError(
            f"--lengths: {longest} tokens with the answer are more than max_model_len "
            f"{loaded.spec.model.max_model_len}",
            2,
        )
    return workload


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PdctlError(f"--lengths: {text!r} is no list such as 2048,4096", 2) from None


def _arms(asked: Asked) -> list[Arm]:
    if asked.arms is None and asked.attach:
        return [Arm("as-it-runs")]
    arms = arms_named(asked.arms or "off,on")
    if asked.attach and any(arm.bidirectional is False for arm in arms):
        raise PdctlError(
            "--attach leaves the engines as they are and off needs a restart: leave --arms out, "
            "or compare routes",
            2,
        )
    return arms


def _ages(asked: Asked, loaded: Loaded | None) -> bool:
    if asked.age is not None:
        return asked.age
    return loaded is not None and loaded.spec.engine.device == "cuda"


def _targets(asked: Asked) -> dict[str, Target]:
    """By arm."""
    if not asked.urls:
        raise PdctlError("--client http needs --url", 2)
    key = os.environ.get(KEY_VARIABLE)
    targets = {}
    for given in asked.urls:
        name, mark, url = given.partition("=")
        if not mark or "/" in name:
            name, url = "url", given
        url = url.rstrip("/").removesuffix("/v1")
        if name in targets or not url.startswith(("http://", "https://")):
            raise PdctlError(f"--url: {given!r} is no NAME=http://HOST:PORT of its own", 2)
        model = asked.model or _first_model(url, key)
        targets[name] = Target(url, model, key, asked.session_header)
    return targets


def _first_model(url: str, key: str | None) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{url}/v1/models", headers=headers, timeout=10.0, trust_env=False)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise PdctlError(
            f"{url}/v1/models: {error or type(error).__name__}; --model names one"
        ) from None


def _engine_urls(asked: Asked) -> list[EngineLeg]:
    return [
        EngineLeg(f"{role}-{number}", role, url.rstrip("/"))
        for role, urls in (("prefill", asked.prefill_urls), ("decode", asked.decode_urls))
        for number, url in enumerate(urls)
    ]


def run_other_client(asked: Asked, folder: Path, say: Say) -> None:
    """Measure with somebody else's client and keep what it reports as rows.

    Raises:
        PdctlError: wrong options (exit code 2), or it fails.
    """
    targets = _targets(asked)
    if asked.spec is not None or len(targets) != 1:
        raise PdctlError(f"--client {asked.client}: give one --url and no SPEC", 2)
    arm, target = next(iter(targets.items()))
    foreign = Foreign(
        client=asked.client,
        arm=arm if arm != "url" else asked.client,
        target=target,
        program=asked.program,
        tokenizer=asked.tokenizer,
        conversations=asked.repeats or _REPEATS,
        turns=asked.turns,
        new_tokens=asked.new_tokens,
        answer_tokens=asked.answer_tokens or _ANSWER,
        concurrency=asked.concurrency,
        seed=asked.seed or uuid.uuid4().hex[:10],
        trace=asked.trace,
        command=shlex.join(["pdctl", *sys.argv[1:]]),
    )
    run_foreign(foreign, RunFolder(folder), say)
