"""Bringing folder, data sources, dashboards and alert rules into a Grafana."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pdctl.errors import PdctlError
from pdctl.observe.difference import GRAFANAS_OWN, differences
from pdctl.observe.grafana_http import Grafana
from pdctl.observe.grafana_rules import READ_ONLY, Group
from pdctl.observe.stack import dashboards, data_sources
from pdctl.spec.model import Spec
from pdctl.spec.units import parse_duration

_EDITABLE = {"X-Disable-Provenance": "true"}
"""Without it Grafana would let nobody pause a rule or change it by hand."""


@dataclass(frozen=True)
class Change:
    """What was done to one object, or would be."""

    action: Literal["create", "update", "delete", "unchanged"]
    kind: str
    name: str
    difference: tuple[str, ...] = ()


def push_all(
    grafana: Grafana, folder: str, spec: Spec | None, rules: Group | None, dry_run: bool
) -> Iterator[Change]:
    """Bring a Grafana into the wanted state; one change per object, also of the unchanged.

    Args:
        folder: title of the folder; made when missing.
        spec: whose data sources are pushed too; None pushes dashboards alone.
        rules: alert rules to push too.
    """
    if grafana.get("/api/health") is None:
        raise PdctlError(
            f"{grafana.url}: no Grafana there (404 on /api/health); does its URL have a sub-path?"
        )
    uid = _folder_uid(folder)
    yield _folder(grafana, uid, folder, dry_run)
    for source in data_sources(spec) if spec else []:
        yield _data_source(grafana, source, dry_run)
    for name, dashboard in dashboards(spec).items():
        yield _dashboard(grafana, name, dashboard, uid, dry_run)
    if rules is not None:
        yield from _rules(grafana, rules, uid, dry_run)


def _folder(grafana: Grafana, uid: str, title: str, dry_run: bool) -> Change:
    if grafana.get(f"/api/folders/{uid}") is not None:
        return Change("unchanged", "folder", title)
    if not dry_run:
        grafana.send("POST", "/api/folders", {"uid": uid, "title": title})
    return Change("create", "folder", title)


def _data_source(grafana: Grafana, wanted: dict[str, Any], dry_run: bool) -> Change:
    path = f"/api/datasources/uid/{wanted['uid']}"
    there = grafana.get(path)
    if there is None:
        if not dry_run:
            grafana.send("POST", "/api/datasources", wanted)
        return Change("create", "data source", wanted["name"])
    difference = differences(there, wanted)
    if not difference:
        return Change("unchanged", "data source", wanted["name"])
    if not dry_run:
        # What somebody added beside ours, such as a password, stays.
        settings = {**there.get("jsonData", {}), **wanted["jsonData"]}
        grafana.send("PUT", path, {**there, **wanted, "jsonData": settings})
    return Change("update", "data source", wanted["name"], difference)


def _dashboard(
    grafana: Grafana, name: str, wanted: dict[str, Any], folder: str, dry_run: bool
) -> Change:
    there = grafana.get(f"/api/dashboards/uid/{wanted['uid']}")
    body = {"folderUid": folder, "message": "pdctl dashboards push", "overwrite": False}
    if there is None:
        if not dry_run:
            grafana.send(
                "POST", "/api/dashboards/db", {**body, "dashboard": {**wanted, "id": None}}
            )
        return Change("create", "dashboard", name)
    current = there["dashboard"]
    difference = differences(current, wanted)
    if there.get("meta", {}).get("folderUid", folder) != folder:
        difference = (f"folder: {there['meta']['folderUid']} -> {folder}", *difference)
    if not difference:
        return Change("unchanged", "dashboard", name)
    if not dry_run:
        # With its id and version, Grafana refuses when somebody saves at the same moment.
        own = {key: current[key] for key in GRAFANAS_OWN if key in current}
        grafana.send("POST", "/api/dashboards/db", {**body, "dashboard": {**wanted, **own}})
    return Change("update", "dashboard", name, difference)


def _rules(grafana: Grafana, group: Group, folder: str, dry_run: bool) -> Iterator[Change]:
    """Grafana replaces a group as a whole, so what others put into ours is sent along."""
    path = f"/api/v1/provisioning/folder/{folder}/rule-groups/{group.title}"
    there = grafana.get(path)
    current = {rule["uid"]: rule for rule in (there or {}).get("rules", ())}
    wanted = {rule["uid"]: rule for rule in group.rules}
    about = {"interval": group.interval}
    changes = [_change("rule group", group.title, there, about)]
    changes += [
        _change("alert rule", rule["title"], _same_for(current.get(uid), rule), rule)
        for uid, rule in wanted.items()
    ]
    others = {uid: rule for uid, rule in current.items() if uid not in wanted}
    gone = {uid for uid in others if uid.startswith(group.prefix)}
    changes += [Change("delete", "alert rule", others[uid]["title"]) for uid in sorted(gone)]
    if not dry_run and any(change.action != "unchanged" for change in changes):
        rules = [_merged(current.get(uid, {}), rule) for uid, rule in wanted.items()]
        rules += [_merged(rule, {}) for uid, rule in others.items() if uid not in gone]
        placed = {"folderUID": folder, "ruleGroup": group.title}
        body = {"title": group.title, "folderUid": folder, **about}
        body["rules"] = [{"orgID": 1, **rule, **placed} for rule in rules]
        grafana.send("PUT", path, body, _EDITABLE)
    yield from changes


def _change(kind: str, name: str, there: dict[str, Any] | None, wanted: dict[str, Any]) -> Change:
    if there is None:
        return Change("create", kind, name)
    difference = differences(there, wanted)
    return Change("update" if difference else "unchanged", kind, name, difference)


def _same_for(there: dict[str, Any] | None, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The rule that is there, its duration written as ours where it is as long."""
    if there is None:
        return None
    try:
        same = parse_duration(there.get("for", 0)) == parse_duration(wanted["for"])
    except ValueError:
        same = False
    return {**there, "for": wanted["for"]} if same else there


def _merged(there: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """The wanted rule; what somebody added, such as a label, a pause or a receiver, stays."""
    merged = {key: value for key, value in there.items() if key not in READ_ONLY} | wanted
    for key in ("labels", "annotations"):
        if key in merged:
            merged[key] = {**(there.get(key) or {}), **wanted.get(key, {})}
    return merged


def _folder_uid(title: str) -> str:
    """A uid such as Grafana allows: letters, digits, '-' and '_', at most 40."""
    uid = "".join(each if each.isascii() and each.isalnum() else "-" for each in title.lower())
    return uid.strip("-")[:40] or "pdctl"
