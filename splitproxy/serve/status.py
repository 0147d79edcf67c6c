"""What goes on in a proxy, for people and scripts: `/splitproxy/status`."""

from typing import Any

from splitproxy.model import EngineState, Role
from splitproxy.serve import access
from splitproxy.serve.assembly import Proxy


def status(proxy: Proxy) -> dict[str, Any]:
    """What goes on, for people and scripts: engines, pairs, queue, last requests."""
    tables = {table.name: table for table in proxy.config.engines}
    return {
        "policy": proxy.config.split.policy,
        "min_prompt_tokens": proxy.config.split.floor_tokens,
        "engines": [
            {
                "name": name,
                "role": member.role,
                "kind": tables[name].kind,
                "url": tables[name].place,
                "state": member.state,
                "fault": member.fault or None,
                "identity": member.identity,
                "slots": proxy.ledger.count(name),
                "waiting": proxy.admission.waiting_for(name),
                "speeds": proxy.fleet.forecast.speeds.status(name),
                "backlog_s": round(proxy.fleet.forecast.backlog_s(name), 3),
            }
            for name, member in proxy.fleet.members.items()
        ],
        "pairs": [
            {
                "prefill": source,
                "decode": target,
                "state": pair.state,
                "fault": pair.fault or None,
                "checks": pair.report.checks if pair.report else [],
                "prefill_tokens_per_s": pair.report.prefill_tokens_per_s if pair.report else None,
                "decode_tokens_per_s": pair.report.decode_tokens_per_s if pair.report else None,
                "session_bytes_per_token": pair.bytes_per_token or None,
                "session": proxy.fleet.forecast.speeds.pair_status(source, target),
            }
            for (source, target), pair in proxy.fleet.pairs.items()
        ],
        "tokenizer": {
            "source": proxy.config.tokenizer.source,
            "engines": {engine.name: _used(proxy, engine.name) for engine in proxy.config.of_role(Role.DECODE)},
        },
        "added_s": proxy.fleet.forecast.speeds.added_status(),
        "usable_context": usable_context(proxy),
        "queue": {"max": proxy.config.queue.max, "waiting": proxy.admission.waiting, "line": proxy.admission.line()},
        "leases": proxy.ledger.busy(),
        "session_bytes": {"in_flight": proxy.ledger.session_bytes, "limit": proxy.ledger.session_limit_bytes},
        "last_requests": [access.entry(record) for record in reversed(proxy.recent)],
    }


def _used(proxy: Proxy, engine: str) -> dict[str, str]:
    verdict = proxy.tokenizer.verdict(engine)
    return {"used": "local" if verdict.local else "engine", "why": verdict.why}


def usable_context(proxy: Proxy) -> int | None:
    """The smallest context of all engines that are up."""
    ready = [name for name, member in proxy.fleet.members.items() if member.state is EngineState.READY]
    return min((proxy.ledger.context(name) for name in ready), default=None)
