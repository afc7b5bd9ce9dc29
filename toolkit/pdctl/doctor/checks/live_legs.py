"""Whether the legs run, can be reached, and agree on the time."""

import re
from collections.abc import Iterator

from pdctl.doctor.evidence.facts import Command, Evidence, LegEvidence
from pdctl.doctor.legs import answers, health, state
from pdctl.doctor.model import DEPLOYMENT, Answer, Category, Check, Excerpt, Finding, More

CLOCKS_APART_SECONDS = 2.0
_NEW_AT_EVERY_START = re.compile(r"[0-9a-f]{8}")
"""In an engine id: a nonce or a UUID."""
_LOOPBACK = re.compile(r"^(localhost|127\.|::1$|0\.0\.0\.0$|::$)")


def _not_running(evidence: Evidence) -> Iterator[Answer]:
    states = {leg.name: found for leg in evidence.legs if (found := state(leg))}
    stopped = all(found.phase == "not started" for found in states.values())
    if states and stopped and not any(found.detail for found in states.values()):
        silent = [leg for leg in evidence.legs if (h := health(leg)) and h.status is None]
        if len(silent) == len(states):
            yield Finding(
                DEPLOYMENT,
                "certain",
                tuple(found.excerpt for found in states.values())[:3],
                "No leg of the deployment was started with pdctl on this machine, and none answers "
                "at its address.",
                "Start it with `pdctl up SPEC`.",
                severity="warning",
            )
            return
    name = evidence.spec.name if evidence.spec else "DEPLOYMENT"
    engines_up = all((h := health(leg)) is None or h.status == 200 for leg in evidence.engines)
    for leg in evidence.legs:
        found, answer = states.get(leg.name), health(leg)
        if leg.role == "router" and not engines_up and answer and answer.status == 503:
            # It says that a leg is down, and that leg is told of.
            continue
        if found is not None and found.fatal:
            port = "Address already in use" in found.fatal
            yield Finding(
                leg.name,
                "certain",
                (found.excerpt, Excerpt(found.excerpt.source, found.fatal)),
                f"The leg waits for ever: {found.fatal}.",
                "Free the side-channel port (`ss -ltnp` shows who has it) or choose another "
                "side_channel_port, then `pdctl up SPEC`."
                if port
                else "Correct what the line says, then `pdctl up SPEC`.",
            )
        elif found is not None and found.phase == "not started" and found.detail:
            yield Finding(
                leg.name,
                "certain",
                (found.excerpt,),
                f"The leg does not run; its last start ended with: {found.detail}.",
                f"Correct that (`pdctl logs {name} {leg.name}` shows all of it), then "
                "`pdctl up SPEC`.",
            )
        elif found is not None and found.phase == "dead":
            yield Finding(
                leg.name,
                "certain",
                (found.excerpt,),
                f"The leg's process has ended: {found.detail}.",
                f"Correct what its log says (`pdctl logs {name} {leg.name}`), then "
                "`pdctl up SPEC`: it restarts what does not run.",
            )
        elif stopped and states:
            # Stopped with the leg whose start failed.
            continue
        elif answer is not None and answer.status != 200:
            said = f"answers {answer.status}" if answer.status else f"no answer ({answer.error})"
            starting = found is not None and found.phase == "starting"
            absent = found is not None and found.phase == "not started"
            yield Finding(
                leg.name,
                "certain",
                (Excerpt(f"{leg.name}/health", said), *((found.excerpt,) if found else ())),
                f"GET /health of the leg: {said}"
                + ("; it is still starting." if starting else "")
                + ("; pdctl has not started it here." if absent else "")
                + ("." if not starting and not absent else ""),
                f"Wait for it: `pdctl status {name} --watch`."
                if starting
                else "Start it: `pdctl up SPEC`."
                if absent
                else f"Look at its log: `pdctl logs {name} {leg.name}`.",
                severity="info" if starting else None,
            )


def _connects(leg: LegEvidence) -> Iterator[tuple[str, str, Command]]:
    for command in leg.commands:
        if match := re.match(r"connect (\S+) (\d+)$", command.line):
            yield match[1], match[2], command


def _unreachable(evidence: Evidence) -> Iterator[Answer]:
    for leg in evidence.engines:
        answer = health(leg)
        tried = list(_connects(leg))
        for host, _, command in tried:
            if command.output.startswith("does not resolve"):
                yield Finding(
                    leg.name,
                    "certain",
                    (command.excerpt,),
                    f"The name {host} of the leg does not resolve here.",
                    "Correct the leg's host or side_channel_host in the spec, or DNS.",
                )
                break
        else:
            if answer is None or answer.status != 200:
                continue
            for host, port, command in tried[1:]:
                if not command.output.startswith("open"):
                    yield Finding(
                        leg.name,
                        "certain",
                        (command.excerpt, Excerpt(f"{leg.name}/health", "answers 200")),
                        f"The leg is healthy, but its NIXL side channel at {host}:{port} takes no "
                        f"connection ({command.output.strip()}): peers cannot do the handshake.",
                        "Set the leg's side_channel_host to an address that the other legs reach, "
                        "open the port between the nodes, one per data-parallel rank; then "
                        "`pdctl up SPEC`.",
                    )
                    break


def _side_channel_host(evidence: Evidence) -> Iterator[Answer]:
    plan = evidence.plan
    for leg in evidence.engines:
        said = leg.env.get("VLLM_NIXL_SIDE_CHANNEL_HOST") if leg.env else None
        planned = (
            next((each for each in plan.engines if each.name == leg.name), None) if (plan) else None
        )
        if said is None or planned is None:
            continue
        others = {each.host for each in plan.engines} if plan else set()
        wanted = planned.listens[1][0]
        excerpt = Excerpt(f"{leg.name}/env.txt", f"VLLM_NIXL_SIDE_CHANNEL_HOST={said}")
        if said != wanted:
            yield Finding(
                leg.name,
                "certain",
                (excerpt,),
                f"The leg tells its peers to do the NIXL handshake at {said}; the spec says "
                f"{wanted}.",
                "Run `pdctl up SPEC`, so that the leg starts with the spec's side_channel_host.",
            )
        elif _LOOPBACK.match(said) and len(others) > 1:
            yield Finding(
                leg.name,
                "certain",
                (excerpt,),
                f"The leg tells its peers on other machines to do the NIXL handshake at {said}: "
                "they would talk to themselves.",
                "Set the leg's side_channel_host to its address in the network of the legs.",
            )


def _clocks(evidence: Evidence) -> Iterator[Answer]:
    offsets: dict[str, float] = {}
    for leg in evidence.legs:
        found = [offset for each in answers(leg) if (offset := each.clock_offset) is not None]
        if found:
            # The smallest is the one that waited least.
            offsets[leg.name] = min(found, key=abs)
    if len(offsets) < 2:
        return
    slow, fast = min(offsets, key=offsets.__getitem__), max(offsets, key=offsets.__getitem__)
    apart = offsets[fast] - offsets[slow]
    if apart > CLOCKS_APART_SECONDS:
        yield Finding(
            fast,
            "likely",
            tuple(
                Excerpt(f"{leg}/health", f"its clock is {offsets[leg]:+.1f} s off this machine's")
                for leg in (slow, fast)
            ),
            f"The clocks of {fast} and {slow} are {apart:.0f} s apart: traces and logs of the legs "
            "do not line up, and expiry times in handles mislead whoever compares them.",
            "Run chronyd or systemd-timesyncd on every node (169.254.169.123 on EC2) and check "
            "with `chronyc tracking`.",
        )


def _restarted(evidence: Evidence) -> Iterator[Answer]:
    """Decode ended and came back under its old id while prefill went on."""
    since = [
        found.started_at
        for leg in evidence.role("prefill")
        if (found := state(leg)) and found.started_at
    ]
    for leg in evidence.role("decode"):
        engine_id = leg.config.get("engine_id") if leg.config else None
        found = state(leg)
        if not since or found is None or engine_id is None:
            continue
        restarted = found.started_at and any(end > min(since) for end in found.earlier_ends)
        if restarted and not _NEW_AT_EVERY_START.search(str(engine_id)):
            yield Finding(
                leg.name,
                "likely",
                (Excerpt(f"{leg.name}/config.txt", f"engine_id: {engine_id}"), found.excerpt),
                "Decode was restarted under the same engine id while prefill went on. A prefill "
                "that had read from it keeps its old NIXL agent for an hour, and every readback "
                "fails (NIXL_ERR_REMOTE_DISCONNECT, then NIXL_ERR_NOT_FOUND).",
                "Restart the prefill legs now. Then put {nonce} into kv_transfer.engine_id, so "
                "that every start has an id of its own.",
            )


CHECKS = (
    Check(
        code="PD8560",
        title="A leg does not run or is not healthy",
        category=Category.LAUNCH_LIFECYCLE,
        severity="error",
        playbook="leg-not-healthy",
        needs=("commands|http",),
        run=_not_running,
        explains=("PD8505",),
        symptom=True,
    ),
    Check(
        code="PD7560",
        title="The nodes' clocks are apart",
        category=Category.OBSERVABILITY,
        severity="warning",
        playbook="clocks-apart",
        needs=("http",),
        run=_clocks,
    ),
)

MORE = (
    More("PD2001", _side_channel_host, ("env",), (), ("PD2005", "PD4511", "PD4563"), cheap=True),
    More("PD2005", _unreachable, ("commands",), (), ("PD4511", "PD4563")),
    More("PD8501", _restarted, ("config", "metrics", "commands"), (), ("PD4511", "PD4563")),
)
