"""The command line: arguments, logging, signals and exit codes. What the commands do lives elsewhere.

Exit codes: 0 done, 1 something did not work, 2 the command line or configuration is wrong.
"""

import argparse
import asyncio
import itertools
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from splitproxy import __version__
from splitproxy.books.sessions import DEFAULT_DIR, SessionStore, fresh_dir
from splitproxy.config import Config, load
from splitproxy.engines.adapter import PrefillEngine
from splitproxy.errors import ConfigError, EngineError, LaunchError
from splitproxy.fleet.probe import Probe
from splitproxy.measure.payoff import Ladder, Payoff, lengths
from splitproxy.model import InVain, Policy, Role
from splitproxy.serve.app import listening
from splitproxy.serve.assembly import assembled, deadlines, make_engine, make_prefill_engine, make_tokenizer

if TYPE_CHECKING:
    from rich.console import Console

    from splitproxy.run.launch import Launcher
    from splitproxy.run.strata.launch import StrataLauncher

log = logging.getLogger("splitproxy")

Number = TypeVar("Number", int, float)
Closable = TypeVar("Closable", bound=PrefillEngine)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    options = _parser().parse_args(argv)
    _set_up_logging(options.log_level)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code: int = runner.run(options.run(options))
        return code
    except ConfigError as error:
        for fault in error.faults:
            print(fault, file=sys.stderr)
        return 2
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The event loop of the extra `fast` where that is installed: passing an answer on then takes less CPU."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="splitproxy", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.description = "A proxy that lets one engine read long prompts and another write the answers."
    parser.add_argument("--version", action="version", version=f"splitproxy {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="override a key, e.g. split.policy=never"
    )
    common.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")

    def command(name: str, run: Callable[..., object], text: str, *, needs_config: bool) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=text, parents=[common])
        found.add_argument("-c", "--config", metavar="FILE", type=Path, required=needs_config, help="TOML file")
        found.set_defaults(run=run)
        return found

    command("serve", _serve, "Serve in front of engines that run already.", needs_config=True)
    check = command(
        "check", _check, "Show whether handovers work, and from which length on they pay.", needs_config=True
    )
    check.add_argument("--quick", action="store_true", help="only whether they work")
    check.add_argument("--up-to", metavar="TOKENS", type=_positive(int), default=8192, help="the longest prompt (8192)")
    check.add_argument("--rounds", metavar="N", type=_positive(int), default=3, help="prompts of each length (3)")
    check.add_argument("--png", metavar="FILE", type=Path, help="write a picture there, too")
    _add_bench_arguments(
        command("bench", _bench, "Put running engines under a load, split and unsplit.", needs_config=True)
    )
    up = command("up", _up, "Start two engines on this machine, and serve in front of them.", needs_config=False)
    what = up.add_mutually_exclusive_group()
    what.add_argument("--demo", action="store_true", help="use a small model, fetched at the first time")
    what.add_argument(
        "--strata", metavar="FILE", type=Path, help="start two Strata servers from this run config (strata-MODEL.json)"
    )
    return parser


def _add_bench_arguments(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--mix", choices=("chat", "documents", "agent"), default="documents", help="what is asked")
    bench.add_argument("--rate", type=_positive(float), default=0.5, help="requests a second that arrive (0.5)")
    bench.add_argument("--concurrency", type=_positive(int), help="clients that wait for answers, in place of --rate")
    bench.add_argument("--requests", type=_positive(int), default=24, help="of each arm in each round (24)")
    bench.add_argument("--rounds", type=_positive(int), default=2, help="of both arms in turns (2)")
    bench.add_argument("--scale", type=_positive(float), default=1.0, help="makes prompts longer or shorter (1)")
    bench.add_argument("--seed", type=int, default=1, help="other arrivals and lengths")
    bench.add_argument(
        "--policy", choices=("auto", "threshold", "always"), help="of the split arm; default: as configured"
    )
    bench.add_argument("--ttft-limit", metavar="SECONDS", type=_positive(float), default=2.0, help="first token (2)")
    bench.add_argument("--itl-limit", metavar="SECONDS", type=_positive(float), default=0.2, help="p99 of gaps (0.2)")
    bench.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    bench.add_argument("--png", metavar="FILE", type=Path, help="write a picture there")


def _positive(kind: type[Number]) -> Callable[[str], Number]:
    """An argument's type: a finite number above 0."""

    def number(text: str) -> Number:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    number.__name__ = f"positive {kind.__name__}"  # what argparse says is wrong
    return number


def _set_up_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")


# -- serve -------------------------------------------------------------------------------------------------------------


async def _serve(options: argparse.Namespace) -> int:
    config = _with_engines(load(options.config, os.environ, options.set))
    with SessionStore(Path(config.split.dir or DEFAULT_DIR)) as store:
        async with assembled(config, store) as proxy, listening(proxy) as address:
            log.info("serving at %s, policy %s", address, config.split.policy)
            await _until_told_to_stop()
            log.info("stopping; running requests may take %g s", config.drain_s)
    return 0


def _with_engines(config: Config) -> Config:
    if not config.engines:
        raise ConfigError(["engines: none is named; add one [[engines]] table for each engine that runs"])
    return config


async def _until_told_to_stop() -> None:
    """Wait for SIGINT or SIGTERM. A second one does not wait for running requests."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()

    def stop() -> None:
        if told.is_set() and task is not None:
            task.cancel()
        told.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    await told.wait()


# -- up ----------------------------------------------------------------------------------------------------------------


async def _up(options: argparse.Namespace) -> int:
    # The terminal's tables are loaded by the commands that draw them: a proxy that serves for months needs none.
    from rich.console import Console

    from splitproxy.measure import screen

    console = Console()
    config, launcher_in = _launching(load(options.config, os.environ, _up_settings(options)))
    tokenizer = await asyncio.to_thread(make_tokenizer, config)  # before minutes are spent on loading a model
    own_dir = not config.split.dir
    folder = fresh_dir() if own_dir else Path(config.split.dir)
    stopping = asyncio.create_task(_until_told_to_stop())
    with SessionStore(folder, remove_at_close=own_dir) as store:
        launcher = launcher_in(folder)
        try:
            start = launcher.start(lambda role, text: console.print(f"{role} engine: {text}", highlight=False))
            if not await _unless(stopping, start):
                return 130
            config = config.model_copy(update={"engines": launcher.engines})
            async with assembled(config, store, tokenizer) as proxy, listening(proxy) as address:
                launcher.tell(proxy.fleet.health.lost)
                console.print("self-test: one prompt is read, moved and answered", highlight=False)
                if not await _unless(stopping, proxy.fleet.first_verdicts()):
                    return 130
                screen.show_running(console, proxy, address)
                console.print("Ctrl-C stops everything.")
                await stopping
                console.print("stopping")
        finally:
            await launcher.stop()
    return 0


def _up_settings(options: argparse.Namespace) -> list[str]:
    """The command line's settings; with --demo the model is fetched first."""
    settings = list(options.set)
    if options.demo:
        from splitproxy.run.demo import demo_model

        settings.append(f"launch.model={demo_model()}")
    elif options.strata is not None:
        settings.append(f"strata.config={options.strata.absolute()}")
    elif options.config is None:
        raise ConfigError(["up: give a configuration with -c FILE or --strata FILE, or try --demo"])
    return settings


def _launching(config: Config) -> "tuple[Config, Callable[[Path], Launcher | StrataLauncher]]":
    """What is to be started: the configuration with what the engines' own says about it, and how, for a session folder.

    Raises ConfigError.
    """
    from splitproxy.run.launch import Launcher
    from splitproxy.run.strata.launch import StrataLauncher
    from splitproxy.run.strata.plan import plan

    if config.strata is None:
        return config, partial(Launcher, config)
    if config.launch is not None:
        raise ConfigError(["up: [launch] and [strata] both say what to start; leave one out"])
    found = plan(config.strata)
    applied = found.applied(config)
    return applied, partial(StrataLauncher, applied, found)


async def _unless(stopping: "asyncio.Task[None]", work: Coroutine[Any, Any, None]) -> bool:
    """Do the work unless a signal comes first; whether it was done."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        return False
    task.result()
    return True


# -- check -------------------------------------------------------------------------------------------------------------


async def _check(options: argparse.Namespace) -> int:
    from rich.console import Console

    from splitproxy.measure import charts, screen

    console = Console()
    config = _with_engines(load(options.config, os.environ, options.set))
    if options.png is not None:
        charts.require_plots()
    _end_by_sigterm()
    sources, targets = config.of_role(Role.PREFILL), config.of_role(Role.DECODE)
    if not sources:
        raise ConfigError(['engines: none has role = "prefill"; there is no pair to check'])
    tokenizer = await asyncio.to_thread(make_tokenizer, config)
    passed = True
    with SessionStore(Path(config.split.dir or DEFAULT_DIR)) as store:
        for source, target in itertools.product(sources, targets):
            async with (
                _closing(make_prefill_engine(source, store, tokenizer.encode)) as reader,
                _closing(make_engine(target, store, tokenizer.encode)) as writer,
            ):
                name = f"{source.name} -> {target.name}"
                console.print(f"{name}  ({source.place} -> {target.place})", style="bold", highlight=False)
                probe = Probe(reader, writer, 0, 0, deadlines(config.split), partial(screen.show_check, console))
                report = await probe.run(config.split.probe_tokens)
                screen.show_verdict(console, name, report)
                if report.passed:  # else the engine may not even answer
                    await tokenizer.meet(writer)
                    screen.show_tokenizer(console, tokenizer.verdict(target.name))
                    if not options.quick:
                        picture = _own_name(options.png, source.name, target.name, len(sources) * len(targets))
                        await _pays(console, Ladder(reader, writer, 0, 0, deadlines(config.split)), options, picture)
                passed = passed and report.passed
    return 0 if passed else 1


def _end_by_sigterm() -> None:
    """SIGTERM stops a measurement as Ctrl-C does: engines are left clean."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _own_name(png: Path | None, source: str, target: str, pairs: int) -> Path | None:
    """The file of one pair's picture: the one that was named, with the pair's name in it where there are several."""
    return png if png is None or pairs == 1 else png.with_stem(f"{png.stem}-{source}-{target}")


async def _pays(console: "Console", ladder: Ladder, options: argparse.Namespace, picture: Path | None) -> None:
    """The second half of `check`: prompts of growing length, both ways; the picture of it goes to a file, if any."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from splitproxy.measure import charts

    context = min((await ladder.source.identify()).context, (await ladder.target.identify()).context)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("does it pay?")
            ladder.tell = lambda what, done, total: progress.update(task, description=what, completed=done, total=total)
            payoff = await ladder.climb(lengths(context, options.up_to), options.rounds)
    except asyncio.CancelledError:
        console.print("Stopped. The engines' slots are empty again; this is what was measured until then.")
        charts.show_payoff(console, Payoff(tuple(ladder.rungs)))
        raise
    except EngineError as error:
        raise LaunchError(f"an engine failed while prompts were read: {error}") from None
    charts.show_payoff(console, payoff)
    if payoff.read_again_tokens is not None:
        console.print(f"  - {ladder.target.remedy(InVain.NO_CHECKPOINTS)}", highlight=False)
    if picture is not None:
        charts.save_payoff(picture, payoff)


# -- bench -------------------------------------------------------------------------------------------------------------


async def _bench(options: argparse.Namespace) -> int:
    import orjson
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from splitproxy.measure import charts
    from splitproxy.measure.bench import Load, benching
    from splitproxy.measure.measures import Limits

    console = Console()
    config = _with_engines(load(options.config, os.environ, options.set))
    if options.png is not None:
        charts.require_plots()
    _end_by_sigterm()
    asked = Load(
        options.mix, options.requests, options.rate, options.concurrency or 0, options.rounds, options.scale,
        options.seed, Limits(options.ttft_limit, options.itl_limit),
    )  # fmt: skip
    policy = Policy(options.policy) if options.policy else config.split.policy
    if policy is Policy.NEVER:
        raise ConfigError(['bench: split.policy is "never", so there is nothing to compare; give --policy'])
    if config.split.policy is Policy.NEVER:  # which would leave the self-test out
        config = config.model_copy(update={"split": config.split.model_copy(update={"policy": policy})})
    logging.getLogger("splitproxy").setLevel(max(logging.WARNING, logging.getLogger().level))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        SessionStore(Path(config.split.dir or DEFAULT_DIR)) as store,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("self-test", total=2 * asked.rounds * asked.requests)

        def told(arm: str, done: int, _total: int) -> None:
            progress.update(task, description=arm, completed=done)

        async with benching(config, store, asked, told) as bench:
            await bench.run(policy)
    arms = bench.summaries()
    charts.show_comparison(console, asked.title, arms)
    if options.json is not None:
        figures = {"load": asked, "policy": policy, "arms": {name: one.as_json() for name, one in arms.items()}}
        options.json.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    if options.png is not None:
        charts.save_comparison(options.png, asked.title, arms)
    return 0


@asynccontextmanager
async def _closing(engine: Closable) -> AsyncGenerator[Closable]:
    try:
        yield engine
    finally:
        await engine.close()
