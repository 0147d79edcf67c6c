"""A folder with all that `splitproxy up --strata` needs, a small program in the place of Strata's server, and what that
program wrote down."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitproxy.config import Config
from splitproxy.model import Role
from splitproxy.run.strata.launch import StrataLauncher
from splitproxy.run.strata.plan import Plan, plan

ROOT = Path(__file__).parent.parent

# Stands in for `python -m serve.server`. What it does is written in $FAKE/events, each event with the role that its
# config's card stands for; a file named ROLE.KNOB there turns a knob: `broken` ends it at once, `lazy` never loads the
# model, `fresh` gives the arena a creator.
SERVER = f"""#!{sys.executable}
import argparse, http.server, json, os, pathlib, signal, subprocess, sys, time

options = argparse.ArgumentParser()
for flag in ("--engine", "--config", "--host", "--port"):
    options.add_argument(flag, required=True)
asked_for = options.parse_args()
fake = pathlib.Path(os.environ["FAKE"])
config = json.loads(pathlib.Path(asked_for.config).read_text())
role = "prefill" if config["gpu"] == 3 else "decode"

def event(word):
    facts = dict(role=role, word=word, pid=os.getpid(), cwd=os.getcwd(), engine=asked_for.engine, config=config,
                 card=os.environ.get("CUDA_VISIBLE_DEVICES"), key=os.environ.get("STRATA_API_KEY"),
                 path=asked_for.config, mode=os.stat(asked_for.config).st_mode & 0o777)
    with open(fake / "events", "a") as file:
        file.write(json.dumps(facts) + "\\n")

def knob(name):
    return (fake / f"{{role}}.{{name}}").exists()

def stop(*_):
    event("asked to stop")
    engine.stdin.close()
    engine.wait()
    event("engine left")
    os._exit(0)

event("started")
print("loading the model", flush=True)
if knob("broken"):
    sys.exit("the engine did not start")
if "--shared-expert-arena" in config["args"]:
    arena = config["args"][config["args"].index("--shared-expert-arena") + 1]
    open(arena, "ab").write(b"experts")
# The engine leaves when its input ends, and saves what it has learned first.
engine = subprocess.Popen(
    ["sh", "-c", "trap '' TERM; cat; echo learned > " + str(fake / f"{{role}}.learned")], stdin=subprocess.PIPE
)
signal.signal(signal.SIGTERM, stop)
asked = 0

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        loaded = asked > 2 and not knob("lazy")
        if loaded and asked == 3:
            event("ready")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({{"status": "ok", "service": "strata", "loaded": loaded}}).encode())

    def log_message(self, *_):
        pass

http.server.HTTPServer((asked_for.host, int(asked_for.port)), Handler).serve_forever()
"""

# What leads from a launcher's command to the fake engine of these tests, in the place of Strata's server and engine.
FAKE_SERVER = f"""#!{sys.executable}
import json, os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(given["--config"]) as file:
    config = json.load(file)
http = ["--http", given["--port"], "--slot-save-path", config["slot_save_path"]]
os.chdir({str(ROOT)!r})
os.execv(sys.executable, [sys.executable, "-m", "tests.fake_strata", *http, *config["args"]])
"""
FAKE_ENGINE = f"""#!{sys.executable}
import os, sys
os.chdir({str(ROOT)!r})
os.execv(sys.executable, [sys.executable, "-m", "tests.fake_strata", *sys.argv[1:]])
"""

PACK_BYTES = 1000


@dataclass(frozen=True)
class Event:
    """What a server wrote down: the role, what happened, and all that it was given."""

    role: str
    word: str
    facts: dict[str, Any]


class StrataBench:
    """A checkout with a run config, a pack and the program, and a folder for sessions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkout = folder / "checkout"
        self.sessions = folder / "sessions"
        self.pack = folder / "pack"
        for path in (self.checkout, self.sessions, self.pack):
            path.mkdir()
        self.server = self.checkout / "serve"
        self.server.write_text(SERVER)
        self.server.chmod(0o755)
        (self.checkout / "strata").write_text("the engine's program")
        (self.pack / "experts.bin").write_bytes(bytes(PACK_BYTES))
        self.run_config = self.checkout / "strata-x.json"

    def write(self, section: Any = None, **keys: Any) -> Path:
        """The run config; `section` adds to split_serve."""
        pair = {"prefill_gpu": 3, "decode_gpu": 1, "min_prompt_tokens": 500, **(section or {})}
        args = ["--pack", str(self.pack), "--session-min-free-mib", 0]
        tree = {"exe": "strata", "args": args, "log": "engine.log", "split_serve": pair, **keys}
        self.run_config.write_text(json.dumps(tree))
        return self.run_config

    def with_fakes(self) -> None:
        """Put the fake engine in the place of server and program: a pair of them answers requests."""
        self.server.write_text(FAKE_SERVER)
        program = self.checkout / "strata"
        program.write_text(FAKE_ENGINE)
        program.chmod(0o755)

    def config(self, **strata: Any) -> Config:
        table = {"config": str(self.run_config), "command": ["./serve"], "log_dir": str(self.folder / "logs"), **strata}
        return Config.model_validate({"strata": table})

    def plan(self, **strata: Any) -> Plan:
        table = self.config(**strata).strata
        assert table
        return plan(table)

    def launcher(self, tables: dict[str, Any] | None = None, **strata: Any) -> StrataLauncher:
        found = self.plan(**strata)
        config = self.config(**strata).model_dump(exclude_unset=True) | (tables or {})
        return StrataLauncher(found.applied(Config.model_validate(config)), found, self.sessions, heal_interval_s=0.1)

    def turn(self, role: Role, knob: str) -> None:
        (self.folder / f"{role}.{knob}").touch()

    def events(self) -> list[Event]:
        try:
            lines = (self.folder / "events").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [Event(facts["role"], facts["word"], facts) for facts in map(json.loads, lines)]

    def words(self) -> list[str]:
        return [f"{event.role} {event.word}" for event in self.events()]

    def started(self, role: Role) -> dict[str, Any]:
        """What the server that was started last in this role was given."""
        return [event.facts for event in self.events() if (event.role, event.word) == (role, "started")][-1]
