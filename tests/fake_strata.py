"""A Strata engine without a model: `strata --serve` on standard input and output, with switches for its failures.

    python -m tests.fake_strata --serve --max-context 4096              speaks the line protocol
    python -m tests.fake_strata --http 8095 --slot-save-path DIR        the HTTP server in front of one

Further flags of the real engine are taken and left alone. A switch is set with `--set save_error=storage`, or at any
time in the JSON file that --knobs names, which is read before each command. --journal names a file that every command's
head is written to.
"""

import argparse
import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from tests.fake_model import END as END_OF_TURN
from tests.fake_model import VOCABULARY, Weights
from tests.fake_strata_model import Conversation, SessionError, fit, read, write

BLOCK_BYTES = 4096  # of a session file, between two lines about it
SPARE_MIB = 4096


@dataclass
class Knobs:
    """How the engine behaves."""

    # at its start
    start_lines: str = ""  # before INFO
    ready_line: str = ""  # after READY
    never_ready: bool = False
    dies_at_start: bool = False
    # what it can
    knows_prefill: bool = False
    keeps_errors: bool = False  # an early refusal is not flushed: it comes with the next line
    stops: bool = True
    done_fields: int = 15
    # while a prompt is read
    chunk_s: float = 0.0  # for each chunk
    write_s: float = 0.0  # for each token
    silent: bool = False  # no line at all
    silent_after: int | None = None  # tokens read
    dies_after: int | None = None  # tokens read
    error_after: int | None = None  # an ERR line, then the end of the process
    chatter: bool = False  # lines of no protocol in between
    starts_late_s: float = 0.0  # from a command's arrival to its start; a STOP in between is lost
    first_line: str = ""  # before all that an answer prints
    strange_line: str = ""  # printed before the first chunk
    finish: str = ""  # another word than length
    one_done_more: bool = False  # before the right one, of a token fewer
    wrong_prompt: int = 0  # DONE tells of so many tokens fewer
    late_stop: bool = False  # STOP is noticed at the end only
    # while a file is saved or restored
    save_error: str = ""  # SERR of this kind
    restore_error: str = ""
    published: bool = False
    restore_fatal: bool = False
    save_line: str = ""  # a line that must not come, in the middle of a save
    save_silent: bool = False  # in a step
    save_s: float = 0.0
    dies_in_save: bool = False  # with an unfinished file beside the target
    session_backwards: bool = False
    nan_ms: bool = False
    wrong_count: int = 0  # SAVED tells of so many tokens fewer
    truncate_bytes: int = 0
    spare_mib: int | None = None  # free space is taken to be this

    def update(self, changes: dict[str, Any]) -> None:
        known = {field.name for field in fields(self)}
        for name, value in changes.items():
            if name not in known:
                raise SystemExit(f"there is no switch {name!r}")
            setattr(self, name, value)


class Engine:
    """The engine behind the pipe."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.knobs = Knobs()
        self.fit = fit(given.weights, given.max_context, given.kv, given.version_name)
        self.weights = Weights(given.weights)
        self.held = Conversation()
        self.commands: queue.Queue[str] = queue.Queue()
        self.stop = threading.Event()
        self.kept = ""  # printed, but not flushed

    # ---- the pipe ----

    def run(self) -> None:
        self._update()
        knobs = self.knobs
        for line in knobs.start_lines.splitlines():
            self.say(line)
        if knobs.dies_at_start:
            self.die()
        given = self.given
        self.say(
            f"INFO context={given.max_context} kv={given.kv} kv_resident=0 spec=0 vram_free_mib=1000 "
            f"conversation_cache_mib=0 pool_workers=2 engine={given.version_name}"
        )
        if knobs.never_ready:
            time.sleep(3600)
        self.say(f"READY {given.max_context}{' stop' if knobs.stops else ''}")
        if knobs.ready_line:
            self.say(knobs.ready_line)
        threading.Thread(target=self._listen, daemon=True).start()
        while (command := self.commands.get()) != "QUIT":
            self._update()
            time.sleep(self.knobs.starts_late_s)
            self.stop.clear()
            self._do(command)

    def _listen(self) -> None:
        for line in sys.stdin:
            if (command := line.rstrip("\r\n")) == "STOP":
                self._note("STOP")
                self.stop.set()
            else:
                self.commands.put(command)
        self.commands.put("QUIT")

    def _update(self) -> None:
        for setting in self.given.set:
            self.knobs.update(_setting(setting))
        if self.given.knobs and Path(self.given.knobs).exists():
            self.knobs = Knobs()
            for setting in self.given.set:
                self.knobs.update(_setting(setting))
            self.knobs.update(json.loads(Path(self.given.knobs).read_text()))

    def _note(self, head: str) -> None:
        if self.given.journal:
            with open(self.given.journal, "a") as file:
                file.write(head + "\n")

    def say(self, line: str) -> None:
        sys.stdout.write(self.kept + line + "\n")
        sys.stdout.flush()
        self.kept = ""

    def refuse(self, reason: str) -> None:
        if self.knobs.keeps_errors:
            self.kept += f"ERR {reason}\n"
        else:
            self.say(f"ERR {reason}")

    def die(self) -> NoReturn:
        os._exit(1)

    def _do(self, command: str) -> None:
        head, _, rest = command.partition(" ")
        match head:
            case "GEN":
                words = rest.split(" ")
                self._note(" ".join(["GEN", *words[:-1], f"<{words[-1].count(',') + 1} ids>"]))
                self._generate(words)
            case "SAVE" | "RESTORE":
                self._note(head)
                self._session(head, rest)
            case _:
                self._note(head)
                self.refuse("expected: GEN <max_new> [key=value ...] <ids>, SAVE, RESTORE, STOP, QUIT")

    # ---- GEN ----

    def _generate(self, words: Sequence[str]) -> None:
        keys = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        ids_at = next((word for word in words[1:] if "=" not in word), "")
        try:
            max_new = int(words[0])
            ids = [int(word) for word in ids_at.split(",")]
        except ValueError:
            self.refuse("bad request: ids")
            return
        only_reads = max_new == 0 and keys.get("prefill") == "1" and self.knobs.knows_prefill
        if max_new < 1 and not only_reads:
            self.refuse("bad request: max_new")
        elif len(ids) + max_new + 8 > self.given.max_context:
            self.refuse(
                f"prompt ({len(ids)} tokens) + max_new ({max_new}) exceeds the context ({self.given.max_context})"
            )
        elif not all(0 <= token < VOCABULARY for token in ids):
            self.refuse("a token id is outside the vocabulary")
        else:
            self._answer(ids, max_new, keys.get("ckpt") != "0")

    def _answer(self, ids: list[int], max_new: int, saveable: bool) -> None:
        knobs, held, started = self.knobs, self.held, time.perf_counter()
        if knobs.silent:
            time.sleep(3600)
        if knobs.first_line:
            self.say(knobs.first_line)
        reused = held.reusable(ids)
        held.keep(reused)
        self.say(f"RESUME {reused}")
        if knobs.strange_line:
            self.say(knobs.strange_line)
        stop_at = len(ids) - 1 if max_new == 0 else len(ids)
        for place in self._chunks(reused, stop_at):
            if self.stop.is_set() and not knobs.late_stop:
                ms = _ms(started)
                self._done(0, len(ids), ms, 0.0, "cancel", reused, len(held.ids) - reused)
                return
            time.sleep(knobs.chunk_s)
            fresh = ids[len(held.ids) : place]
            held.add(fresh, self.weights)
            ms = _ms(started)
            if knobs.chatter:
                self.say("note: the expert cache was adapted")
            self.say(f"PP {place} {len(ids)} {ms:.0f} {1000 * len(fresh) / max(ms, 0.001):.1f}")
            self._trouble(len(held.ids) - reused)
        held.mark_prompt(reused, self.given.prompt_cache)
        held.complete = saveable
        self.say(f"REUSED {reused}")
        read_ms, written, finish = _ms(started), 0, knobs.finish or "length"
        for sample in self.weights.answers(held.words):
            if written == max_new:
                break
            if self.stop.is_set():
                finish = "cancel"
                break
            time.sleep(knobs.write_s)
            written += 1
            self.say(f"T {sample.token}")
            if sample.token == END_OF_TURN:
                finish = "stop"
                break
            if written < max_new:
                held.add([sample.token], self.weights)
        total = len(ids) - knobs.wrong_prompt
        if knobs.one_done_more:
            self._done(written, total - 1, read_ms, 0.0, finish, reused, stop_at - reused)
        self._done(written, total, read_ms, _ms(started) - read_ms, finish, reused, stop_at - reused)

    def _chunks(self, start: int, end: int) -> Iterator[int]:
        """Where each chunk ends; one also ends where trouble is due."""
        due = {n + start for n in (self.knobs.silent_after, self.knobs.dies_after, self.knobs.error_after) if n}
        return iter(
            sorted({*range(start + self.given.chunk, end, self.given.chunk), *(n for n in due if n < end), end})
        )

    def _trouble(self, read_tokens: int) -> None:
        knobs = self.knobs
        if knobs.silent_after is not None and read_tokens >= knobs.silent_after:
            while not self.stop.is_set():
                time.sleep(0.005)
        if knobs.dies_after is not None and read_tokens >= knobs.dies_after:
            self.die()
        if knobs.error_after is not None and read_tokens >= knobs.error_after:
            self.say("ERR verify: timed out at layer 3")
            self.die()

    def _done(self, written: int, total: int, read_ms: float, ms: float, finish: str, reused: int, read: int) -> None:
        values: list[object] = [
            written, total, f"{read_ms:.1f}", f"{ms:.1f}", finish, 0, 0, reused, 0, 0, 0, 0, "0.0", read, 0,
            0, 0, 0, 0, 0,
        ]  # fmt: skip
        self.say(f"DONE {' '.join(map(str, values[: self.knobs.done_fields]))}")

    # ---- session files ----

    def _session(self, command: str, path: str) -> None:
        started = time.perf_counter()
        try:
            if not path:
                raise SessionError("invalid", "no path")
            if not self.given.prompt_cache:
                raise SessionError("invalid", "session files need a prompt cache")
            self.say("SWAIT fingerprint 61")
            tokens, size = (self._save if command == "SAVE" else self._restore)(Path(path))
        except SessionError as error:
            self.say(f"SERR {error.kind} {int(error.published)} {error.reason}")
            return
        ms = "nan" if self.knobs.nan_ms else f"{_ms(started):.1f}"
        self.say(f"{'SAVED' if command == 'SAVE' else 'RESTORED'} {tokens - self.knobs.wrong_count} {size} {ms}")

    def _save(self, path: Path) -> tuple[int, int]:
        knobs, held = self.knobs, self.held
        if not held.complete:
            raise SessionError("invalid", "there is no complete session")
        self.say("SWAIT capture 61")
        raw = self.fit.pack(held)
        spare = self.given.session_min_free_mib
        free_mib = shutil.disk_usage(path.parent).free // 2**20 if knobs.spare_mib is None else knobs.spare_mib
        if spare and free_mib < len(raw) // 2**20 + spare:
            raise SessionError("storage", f"{spare} MiB must stay free")
        if knobs.save_error and not knobs.published:
            raise SessionError(knobs.save_error, "on purpose")
        time.sleep(knobs.save_s)
        for done in (*range(0, len(raw), BLOCK_BYTES), len(raw)):
            self.say(f"SESSION {done} {len(raw)}")
        if knobs.session_backwards:
            self.say(f"SESSION 0 {len(raw)}")
        if knobs.save_line:
            self.say(knobs.save_line)
        if knobs.dies_in_save:
            path.with_name(f".{path.name}.0123456789abcdef.tmp").write_bytes(raw[:100])
            self.die()
        self.say("SWAIT flush 61")
        if knobs.save_silent:
            time.sleep(3600)
        write(path, raw[: len(raw) - knobs.truncate_bytes])
        self.say("SWAIT publish 61")
        if knobs.save_error:
            raise SessionError(knobs.save_error, "the folder was not flushed", published=True)
        return len(held.ids), len(raw)

    def _restore(self, path: Path) -> tuple[int, int]:
        raw = read(path)
        if self.knobs.restore_error:
            raise SessionError(self.knobs.restore_error, "on purpose")
        found = self.fit.unpack(raw, self.given.max_context)
        for done in (*range(0, len(raw), BLOCK_BYTES), len(raw)):
            self.say(f"SESSION {done} {len(raw)}")
        self.say("SWAIT validate 61")
        self.say("SWAIT transfer 61")
        if self.knobs.restore_fatal:
            self.say("FATAL the state was changed before the failure")
            self.die()
        self.held = found
        return len(found.ids), len(raw)


def _setting(text: str) -> dict[str, Any]:
    """`chunk_s=0.5` as {"chunk_s": 0.5}; what is no JSON is a word."""
    name, _, value = text.partition("=")
    try:
        return {name: json.loads(value)}
    except ValueError:
        return {name: value}


def _ms(started: float) -> float:
    return 1000 * (time.perf_counter() - started)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fake_strata",
        description="A Strata engine without a model, with switches for its failures.",
    )
    parser.add_argument("--serve", action="store_true", help="speak the line protocol (also without this flag)")
    parser.add_argument("--max-context", type=int, default=32768)
    parser.add_argument("--kv", default="int8")
    parser.add_argument("--prefill", dest="chunk", type=int, default=512, help="tokens in one chunk of a prompt")
    parser.add_argument("--prompt-cache", type=int, default=6)
    parser.add_argument("--session-min-free-mib", type=int, default=SPARE_MIB)
    parser.add_argument("--weights", type=int, default=1, help="another number is another model")
    parser.add_argument("--version-name", default="0.1.30-fake")
    parser.add_argument("--set", action="append", default=[], metavar="SWITCH=JSON", help=f"one of {_switches()}")
    parser.add_argument("--knobs", default="", metavar="FILE", help="JSON of switches, read before each command")
    parser.add_argument("--journal", default="", metavar="FILE")
    parser.add_argument("--http", type=int, metavar="PORT", help="serve HTTP instead; see --slot-save-path")
    parser.add_argument("--slot-save-path", type=Path)
    parser.add_argument("--api-key", default="")
    # A launcher may hand over any of the engine's flags.
    return parser.parse_known_args(argv)[0]


def _switches() -> str:
    return ", ".join(field.name for field in fields(Knobs))


def main(argv: Sequence[str]) -> None:
    given = arguments(argv)
    if given.http is not None:
        from tests.fake_strata_server import serve  # it brings an HTTP server

        serve(given)
    else:
        Engine(given).run()


if __name__ == "__main__":
    main(sys.argv[1:])
