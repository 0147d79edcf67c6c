"""What people see in the terminal: the steps of a self-test, and the table of what is running. It decides nothing."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from splitproxy.fleet.probe import Check, Report
from splitproxy.model import EngineState, PairState
from splitproxy.serve.assembly import Proxy
from splitproxy.tokens.tokenize import Verdict

STEPS = {
    "identity": "the engines are the same",
    "tokens": "both read text alike",
    "own reading": "decode engine alone",
    "read": "prompt read",
    "saved": "session saved",
    "file": "session file checked",
    "restored": "session restored",
    "reused": "tokens reused",
    "text": "answer compared",
}


def show_check(console: Console, check: Check) -> None:
    """One step of a self-test, as it ends."""
    mark = Text("ok  ", "green") if check.passed else Text("FAIL", "bold red")
    name = Text(f"{STEPS.get(check.name, check.name):<26}")
    console.print(Text.assemble("  ", mark, "  ", name, f"{check.seconds:8.3f} s  ", check.detail), soft_wrap=True)


def show_verdict(console: Console, name: str, report: Report) -> None:
    """What a self-test has come to, and what to change."""
    if report.passed:
        speeds = f"reads {report.prefill_tokens_per_s:,.0f} tokens/s against {report.decode_tokens_per_s:,.0f}"
        console.print(f"{name}: [bold green]proven[/]. The prefill engine {speeds} on the decode engine.")
        return
    console.print(f"{name}: [bold red]not usable for handovers[/]. {report.fault}", highlight=False)
    for advice in report.advice:
        console.print(f"  - {advice}", highlight=False)


def show_tokenizer(console: Console, verdict: Verdict) -> None:
    """Where token ids come from, and why."""
    where = "here" if verdict.local else "by the decode engine"
    console.print(f"token ids are made {where}: {verdict.why}", highlight=False, markup=False, soft_wrap=True)


def show_running(console: Console, proxy: Proxy, address: str) -> None:
    """The engines, what was proven, and how to try it."""
    console.print(_engines(proxy))
    console.print(_pairs(proxy))
    links = f"\nOpenAI base URL: [bold]{address}/v1[/]   status: {address}/splitproxy/status"
    console.print(links, soft_wrap=True)
    console.print("Try a long prompt; its log line below says which way it went, and why:", highlight=False)
    key = ' -H "Authorization: Bearer $KEY"' if proxy.config.api_keys else ""
    sentence = "The quick brown fox jumps over the lazy dog, number $(seq -s ' ' 1 {0}). What came before the dog?"
    prompt = sentence.format(max(300, proxy.config.split.floor_tokens // 3))
    body = '{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"' + prompt
    body += '\\"}], \\"max_tokens\\": 24, \\"stream\\": true}'
    line = f'  curl -N {address}/v1/chat/completions{key} -H "Content-Type: application/json" -d "{body}"'
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _engines(proxy: Proxy) -> Table:
    table = _table("engine", "role", "address", "state", "slots", "context")
    places = {engine.name: engine.place for engine in proxy.config.engines}
    for name, member in proxy.fleet.members.items():
        ready = member.state is EngineState.READY
        state = Text("ready", "green") if ready else Text(member.fault or member.state.value, "red")
        identity = member.identity
        sizes = (str(identity.slots), f"{identity.context:,}") if ready and identity is not None else ("-", "-")
        table.add_row(name, member.role.value, places[name], state, *sizes)
    return table


def _pairs(proxy: Proxy) -> Table:
    table = _table("handover", "state", "reused", "session", "save", "restore", "reading, tokens/s")
    for (source, target), pair in proxy.fleet.pairs.items():
        proven = pair.state is PairState.PROVEN
        state = Text("proven", "green") if proven else Text(pair.fault or pair.state.value, "red")
        table.add_row(f"{source} -> {target}", state, *_proof(pair.report if proven else None))
    return table


def _proof(report: Report | None) -> Sequence[str]:
    if report is None:
        return ("-",) * 5
    said = {check.name: check.detail for check in report.checks}
    return (
        said["reused"].removeprefix("cache_n "),
        f"{report.session_bytes / 2**20:.1f} MiB",
        f"{report.save_ms:.0f} ms",
        f"{report.restore_ms:.0f} ms",
        f"prefill {report.prefill_tokens_per_s:,.0f}\ndecode {report.decode_tokens_per_s:,.0f}",
    )


def _table(*columns: str) -> Table:
    table = Table(header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def show_faults(console: Console, faults: Iterable[str]) -> None:
    """Why something did not start, one line each."""
    for fault in faults:
        console.print(fault, style="red", highlight=False, markup=False, soft_wrap=True)
