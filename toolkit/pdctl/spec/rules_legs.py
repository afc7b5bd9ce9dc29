"""Rules between the legs of a spec: engine ids, lengths, ports, hosts, parallelism."""

import re
from collections.abc import Iterator

from pdctl.spec.faults import Broken, Where, shown
from pdctl.spec.model import Leg, Role, Spec
from pdctl.spec.stand_ins import HOST, MAX_MODEL_LEN

_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1", re.IGNORECASE)
_ANY = ("0.0.0.0", "::")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def legs(spec: Spec) -> Iterator[tuple[Where, str, Role, Leg]]:
    """Path, name, role's settings and the leg itself, of every engine leg."""
    for name in ("prefill", "decode"):
        role: Role = getattr(spec, name)
        for index, leg in enumerate(role.legs):
            yield (name, "legs", index), f"{name}-{index}", role, leg


def broken_between_legs(spec: Spec) -> Iterator[Broken]:
    seen: set[tuple[Where, str]] = set()
    for rule in (_ids, _lengths, _ports, _hosts, _parallelism):
        for broken in rule(spec):
            # A role's or the whole deployment's value is wrong once, not once per leg.
            if (broken.where, rule.__name__) not in seen:
                yield broken
            seen.add((broken.where, rule.__name__))


def _setting(where: Where, role: Role, leg: Leg, key: str) -> tuple[Where, int]:
    """A leg's value for a count, and where it was said."""
    own = key in leg.model_fields_set
    value: int = getattr(leg if own else role, key)
    return ((*where, key) if own else (where[0], key)), value


def _ids(spec: Spec) -> Iterator[Broken]:
    taken: dict[str, tuple[str, Where]] = {}
    for where, name, _, leg in legs(spec):
        at: Where = (*where, "engine_id") if leg.engine_id else ("kv_transfer", "engine_id")
        pattern = leg.engine_id or spec.kv_transfer.engine_id
        own = f"{name}: engine_id" if leg.engine_id else "kv_transfer.engine_id"
        unknown = sorted(
            set(_PLACEHOLDER.findall(pattern)) - {"deployment", "role", "leg", "nonce"}
        )
        plain = _PLACEHOLDER.sub("", pattern)
        if unknown or not re.fullmatch(r"[A-Za-z0-9._-]*", plain):
            what = (
                f"does not know {{{unknown[0]}}}"
                if unknown
                else f"{shown(pattern)} has odd characters"
            )
            yield Broken(
                at,
                f"{own}: {what}; use letters, digits, '.', '_', '-' and {{deployment}}, {{role}}, "
                "{leg}, {nonce}",
            )
            continue
        if "{nonce}" not in pattern:
            yield Broken(
                at,
                f"{own}: {shown(pattern)} has no {{nonce}}: a leg restarted under its old engine "
                "id is never read from again; put {nonce} into it",
            )
            continue
        filled = (
            pattern.replace("{deployment}", spec.name)
            .replace("{leg}", name)
            .replace("{role}", str(where[0]))
        )
        if filled in taken:
            other, other_at = taken[filled]
            yield Broken(
                at,
                f"{own}: {shown(pattern)} does not tell {name} from {other}; put {{leg}} into it",
                also=(other_at,),
            )
        taken.setdefault(filled, (name, at))


def _lengths(spec: Spec) -> Iterator[Broken]:
    common = spec.model.max_model_len
    if common == MAX_MODEL_LEN:
        return
    for where, name, role, leg in legs(spec):
        own, at = leg.max_model_len, (*where, "max_model_len")
        if own is None:
            own, at = role.max_model_len, (where[0], "max_model_len")
        if own is not None and own != common:
            whose = name if len(at) > 2 else at[0]
            yield Broken(
                at,
                f"{whose}: max_model_len {own} differs from model.max_model_len ({common}); "
                "a prompt that one role accepts the other refuses; leave it out",
            )


def _ports(spec: Spec) -> Iterator[Broken]:
    """Two listeners clash when they are on one machine, on one port, and on one address or on
    all of them."""
    taken: dict[tuple[str, int], list[tuple[str, str, Where]]] = {}

    def take(where: Where, host: str, bind: str, port: int, what: str) -> Iterator[Broken]:
        if host == HOST:
            return
        if port > 65535:
            yield Broken(where, f"{what} would be {port}: ports end at 65535")
            return
        machine, address = _machine(host), _address(bind)
        holders = taken.setdefault((machine, port), [])
        for other_address, other, other_where in holders:
            if address == other_address or address in _ANY or other_address in _ANY:
                message = f"{what} is {port} on {host}, already {other}; choose another"
                yield Broken(where, message, also=(other_where,))
                break
        holders.append((address, what, where))

    for where, name, role, leg in legs(spec):
        at = (*where, "port")
        yield from take(at, leg.host, leg.listen_host, leg.port, f"{name}'s port")
        at = (*where, "side_channel_port")
        side = leg.handshake_host
        ranks_at, ranks = _setting(where, role, leg, "data_parallel")
        for rank in range(ranks):
            what = f"{name}'s side-channel port" + (f" of rank {rank}" if ranks > 1 else "")
            for broken in take(at, side, side, leg.side_channel_port + rank, what):
                yield Broken(at, broken.message, also=(*broken.also, ranks_at))
    router = spec.router
    yield from take(("router", "port"), router.host, router.host, router.port, "the router's port")


def _machine(host: str) -> str:
    return "this machine" if _LOOPBACK.fullmatch(host) or host in _ANY else host.lower()


def _address(host: str) -> str:
    return "127.0.0.1" if host.lower() == "localhost" else host.lower()


def _hosts(spec: Spec) -> Iterator[Broken]:
    far = {
        leg.host: (*where, "host")
        for where, _, _, leg in legs(spec)
        if not _LOOPBACK.fullmatch(leg.host) and leg.host not in (*_ANY, HOST)
    }
    for where, name, _, leg in legs(spec):
        for key, host in (("host", leg.host), ("side_channel_host", leg.side_channel_host)):
            at = (*where, key)
            if host in _ANY:
                yield Broken(
                    at, f"{name}: {key} {host} is no address others can reach; that goes into bind"
                )
            elif host and far and _LOOPBACK.fullmatch(host):
                other = min(far)
                yield Broken(
                    at,
                    f"{name}: {key} {host} is reached from its own machine alone, but other legs "
                    f"are on {other}",
                    also=(far[other],),
                )


def _parallelism(spec: Spec) -> Iterator[Broken]:
    """Only legs of different roles read from one another."""
    prefill: dict[int, tuple[str, Where]] = {}
    for where, name, role, leg in legs(spec):
        at, size = _setting(where, role, leg, "tensor_parallel")
        if where[0] == "prefill":
            prefill.setdefault(size, (name, at))
            continue
        for other_size, (other, other_at) in prefill.items():
            if max(size, other_size) % min(size, other_size):
                yield Broken(
                    at,
                    f"{name}: tensor_parallel {size} and {other}'s {other_size}: NIXL needs one "
                    "to be a multiple of the other",
                    also=(other_at,),
                )
                break
