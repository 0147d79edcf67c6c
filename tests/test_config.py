"""Each fault of a configuration in one sentence, all at once, with its place; and which of several settings counts."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitproxy import config
from splitproxy.config import Config, load
from splitproxy.errors import ConfigError
from splitproxy.model import Policy, Role

WRITER = '[[engines]]\nrole = "decode"\nurl = "http://127.0.0.1:8082"\n'
READER = '[[engines]]\nrole = "prefill"\nurl = "http://127.0.0.1:8081"\n'
STDIO = '[[engines]]\nkind = "strata"\nrole = "prefill"\n[engines.process]\nexe = "/opt/strata"\n'
STRATA = '[[engines]]\nkind = "strata"\nrole = "decode"\nurl = "http://127.0.0.1:8095"\n'
LAUNCH = '[launch]\nmodel = "m.gguf"\n'

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(text: str) -> Path:
        path = tmp_path / "splitproxy.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


def faults(path: Path | None, env: Mapping[str, str] | None = None, flags: Sequence[str] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, env or {}, flags)
    return caught.value.faults


# --- one fault, one sentence

FAULTS = [
    # top level
    ("nope = 1", "unknown key nope; known keys here: api_keys, drain_s,"),
    ("polcy = 1", "unknown key polcy; known keys here:"),
    ("keep_alive = 5", "unknown key keep_alive; did you mean 'keep_alive_s'? known keys here:"),
    ("listen = 8080", "listen = 8080: should be a valid string"),
    ('listen = "8080"', "listen = '8080': must be \"HOST:PORT\", for example"),
    ('listen = "localhost:99999"', "listen = 'localhost:99999': must be \"HOST:PORT\""),
    ('listen = ":8080"', "listen = ':8080': must be \"HOST:PORT\""),
    ('listen = "0.0.0.0:80"', "listen = '0.0.0.0:80' can be reached from other machines; set api_keys, or insecure"),
    ('listen = "[::]:80"', "listen = '[::]:80' can be reached from other machines"),
    ('listen = "example.org:80"', "listen = 'example.org:80' can be reached from other machines"),
    ('insecure = "yes"', "insecure = 'yes': should be a valid boolean"),
    ("insecure = 1", "insecure = 1: should be a valid boolean"),
    ("keep_alive_s = 0", "keep_alive_s = 0: should be greater than 0"),
    ("keep_alive_s = true", "keep_alive_s = True: a number is needed, not true or false"),
    ("keep_alive_s = inf", "keep_alive_s = inf: should be a finite number"),
    ("drain_s = -1", "drain_s = -1: should be greater than or equal to 0"),
    ("max_body_mib = 0", "max_body_mib = 0: should be greater than or equal to 1"),
    ("queue = 5", "queue = 5: should be a"),
    ("engines = 5", "engines = 5: should be a"),
    # tables
    ("[queue]\nmax = -1", "queue.max = -1: should be greater than or equal to 0"),
    ("[queue]\nmax = 1.5", "queue.max = 1.5: should be a valid integer"),
    ("[queue]\nmaximum = 1", "unknown key queue.maximum; did you mean 'max'? known keys here: max, timeout_s"),
    ("[queue]\ntimeout_s = false", "queue.timeout_s = False: a number is needed, not true or false"),
    ('[split]\npolicy = "sometimes"', "split.policy = 'sometimes': should be 'auto', 'threshold'"),
    ('[split]\nmin_prompt_tokens = "many"', "split.min_prompt_tokens = 'many': should be a valid integer"),
    ("[split]\nmin_prompt_tokens = true", "split.min_prompt_tokens = True: a number is needed, not true or false"),
    ("[split]\nprobe_tokens = 63", "split.probe_tokens = 63: should be greater than or equal to 64"),
    ("[split]\nreserve_tokens = 0", "split.reserve_tokens = 0: should be greater than or equal to 1"),
    ('[split]\non_prefill_failure = "retry"', "split.on_prefill_failure = 'retry': should be 'local' or 'reject'"),
    ("[split]\nmin_promt_tokens = 1", "unknown key split.min_promt_tokens; did you mean 'min_prompt_tokens'?"),
    ("[tokenizer]\nsource = 5", "tokenizer.source = 5: should be a valid string"),
    ("[split]\ndir = 5", "split.dir = 5: should be a valid string"),
    ('[split]\ndir = "sessions"', "split.dir = 'sessions': must be an absolute path"),
    ('[split]\ndir = "~/sessions"', "split.dir = '~/sessions': must be an absolute path"),
    ('[tokenizer]\nsource = ""', "tokenizer.source = '': "),
    # cards
    (f"{LAUNCH}prefill_gpu = true", "launch.prefill_gpu = True: a number is needed, not true or false"),
    (f"{LAUNCH}decode_gpu = -1", "launch.decode_gpu = -1: should be greater than or equal to 0"),
    (f'{LAUNCH}decode_gpu = "first"', "launch.decode_gpu = 'first': should be a valid integer"),
    (f"{LAUNCH}prefill_gpu = 1\ndecode_gpu = 1", "launch: prefill_gpu and decode_gpu are both 1; each engine needs"),
    (f'{LAUNCH}prefill_gpu = "2"\ndecode_gpu = 2', "launch: prefill_gpu and decode_gpu are both 2"),
    ("[launch]\nargs = []", "launch.model is missing"),
    ('[launch]\nmodel = ""', "launch.model = '': "),
    (f"{LAUNCH}args = [true]", "launch.args.0 = True: should be a valid string"),
    (f'{LAUNCH}gpu = 1\n', "unknown key launch.gpu; known keys here: args,"),
    (f"{LAUNCH}context = 0", "launch.context = 0: should be greater than or equal to 1"),
    # engines
    (f'{WRITER}role_ = "x"', "unknown key engines.0.role_; did you mean 'role'? known keys here: api_key_env, kind,"),
    (f'{WRITER}kind = "vllm"', "engines.0.kind = 'vllm': should be 'llama-server'"),
    (f'{WRITER}name = "a b"', "engines.0.name = 'a b': "),
    (f'{WRITER}name = "-a"', "engines.0.name = '-a': "),
    ('[[engines]]\nurl = "http://h:1"', "engines.0.role is missing"),
    ('[[engines]]\nrole = "decode"', "engines.0.url is missing"),
    ('[[engines]]\nrole = "both"\nurl = "http://h:1"', "engines.0.role = 'both': should be 'prefill' or 'decode'"),
    ('[[engines]]\nrole = "decode"\nurl = "h:1"', "engines.0.url = 'h:1': must be the address of an engine"),
    ('[[engines]]\nrole = "decode"\nurl = "ftp://h"', "engines.0.url = 'ftp://h': must be the address"),
    ('[[engines]]\nrole = "decode"\nurl = "http://h:x"', "engines.0.url = 'http://h:x': must be the address"),
    ('[[engines]]\nrole = "decode"\nurl = "http://h/?a=1"', "engines.0.url = 'http://h/?a=1': must be the address"),
    (READER, 'engines: none has role = "decode"; one must write the answers'),
    (
        STDIO.replace("prefill", "decode"),
        'engines.0: process needs kind = "strata" and role = "prefill"; this engine has kind = \'strata\' and',
    ),
    (
        STDIO.replace("strata", "llama-server", 1),
        'engines.0: process needs kind = "strata" and role = "prefill"; this engine has kind = \'llama-server\'',
    ),
    (STDIO.replace('[engines.', 'url = "http://h:1"\n[engines.'), "engines.0: url and process exclude each other"),
    (STDIO + "exec = 1", "unknown key engines.0.process.exec; did you mean 'exe'? known keys here: args,"),
    (STDIO + 'gpu = "x"', "engines.0.process.gpu = 'x': should be a valid integer"),
    (STDIO + "gpu = true", "engines.0.process.gpu = True: a number is needed, not true or false"),
    (STDIO + "gpu = -1", "engines.0.process.gpu = -1: should be greater than or equal to 0"),
    (STDIO + 'backend = "metal"', "engines.0.process.backend = 'metal': should be 'cuda' or 'hip'"),
    (STDIO + STRATA, "tokenizer.source = 'auto': an engine with a process reads token ids, which are made here"),
    (STDIO + STRATA + '[tokenizer]\nsource = "engine"', "tokenizer.source = 'engine': an engine with a process"),
    (
        READER + STRATA,
        "engines: kind differs (prefill = 'llama-server', decode = 'strata'); a session of one kind of engine cannot",
    ),
    (WRITER + WRITER, "engines: url = 'http://127.0.0.1:8082' is given to more than one engine"),
    (
        f'{WRITER}name = "a"\n{READER}name = "a"',
        "engines: name = 'a' is given to more than one engine",
    ),
    (f'{WRITER}api_key_env = "MISSING_KEY"', "engines: api_key_env = 'MISSING_KEY': there is no such environment"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), FAULTS, ids=[sentence for _, sentence in FAULTS])
def test_each_fault_has_its_sentence(write: Write, text: str, sentence: str) -> None:
    """A fault names the file, the key, the value and what is allowed, and is the only one that is found."""
    path = write(text if "[[engines]]" in text or "[launch]" in text or "engines =" in text else f"{text}\n{WRITER}")
    (found,) = faults(path)
    assert found.startswith(f"{path}: {sentence}")


def test_nothing_to_proxy_is_a_fault() -> None:
    """Without engines and without anything to launch there is nothing to do."""
    (found,) = faults(None)
    assert found.startswith("configuration: engines: none is named; add one [[engines]] table")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"listen = ", "is not valid TOML: "), (b"a = 1\na = 2", "is not valid TOML: "), (b"\xff", "is not valid TOML: ")],
)
def test_a_file_that_is_no_toml(tmp_path: Path, content: bytes, sentence: str) -> None:
    """What cannot be parsed is one fault of the file."""
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    (found,) = faults(path)
    assert found.startswith(f"{path}: {sentence}")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file is a fault in words."""
    assert faults(tmp_path / "none.toml") == [f"{tmp_path / 'none.toml'}: cannot be read: No such file or directory"]


# --- where a fault comes from


def test_a_fault_names_its_origin(write: Write) -> None:
    """The sentence begins with the variable, the command line or the file that the value came from."""
    path = write(f"drain_s = -1\n[split]\nmin_prompt_tokens = -1\n[queue]\nmax = -1\n{WRITER}")
    env = {"SPLITPROXY_QUEUE__MAX": "-2", "SPLITPROXY_SPLIT__MIN_PROMPT_TOKENS": "-2", "SPLITPROXY_NOPE": "1"}
    found = faults(path, env, ["split.min_prompt_tokens=-3"])
    assert {fault.partition(" should")[0].partition(";")[0] for fault in found} == {
        f"{path}: drain_s = -1:",
        "SPLITPROXY_QUEUE__MAX: queue.max = -2:",
        "command line: split.min_prompt_tokens = -3:",
        "SPLITPROXY_NOPE: unknown key nope",
    }


@pytest.mark.parametrize("flag", ["split.policy", "=never", "", "never"])
def test_a_flag_that_is_no_setting(write: Write, flag: str) -> None:
    """A flag without a key or a value says how one looks."""
    (found,) = faults(write(WRITER), flags=[flag])
    assert found == f"command line: {flag!r} is not KEY=VALUE, for example split.policy=never"


def test_a_value_is_no_table(write: Write) -> None:
    """A setting below a key that is no table is refused, and does not replace it."""
    found = faults(write(WRITER), {"SPLITPROXY_ENGINES__0__URL": "http://h"}, ["listen.host=a"])
    assert found[0] == "SPLITPROXY_ENGINES__0__URL: engines.0.url cannot be set: 'engines' is not a table"
    assert not any("listen" in fault and "table" not in fault for fault in found)


# --- all at once


def test_all_faults_are_found_at_once(write: Write) -> None:
    """Faults of single keys do not hide those between keys, and what is refused leads to no fault of its own."""
    path = write(
        """
        listen = "0.0.0.0:80"
        keep_alive_s = 0
        [split]
        policy = "sometimes"
        [launch]
        model = "m.gguf"
        context = 0
        prefill_gpu = 1
        decode_gpu = 1
        [[engines]]
        role = "prefill"
        url = "http://h:1"
        name = "a"
        colour = "red"
        [[engines]]
        role = "prefill"
        url = "http://h:1"
        name = "a"
        kind = "other"
        [[engines]]
        role = "decode"
        """
    )
    found = [fault.removeprefix(f"{path}: ") for fault in faults(path, {}, ["x"])]
    starts = [
        "command line: 'x' is not KEY=VALUE",
        "keep_alive_s = 0",
        "split.policy = 'sometimes'",
        "unknown key engines.0.colour",
        "engines.1.kind = 'other'",
        "engines.2.url is missing",
        "launch.context = 0",
        "launch: prefill_gpu and decode_gpu are both 1",
        "listen = '0.0.0.0:80' can be reached",
        "engines: name = 'a' is given to more than one",
        "engines: url = 'http://h:1' is given to more than one",
    ]
    assert len(found) == len(starts), found
    for fault, start in zip(found, starts, strict=True):
        assert fault.startswith(start)


@pytest.mark.parametrize(
    "text",
    [
        'listen = "0.0.0.0:80"\napi_keys = [""]\n' + WRITER,
        'listen = "0.0.0.0:80"\ninsecure = 1\n' + WRITER,
        'listen = 5\napi_keys = []\n' + WRITER,
        '[[engines]]\nrole = "decode"\nurl = "h"\n' + READER,
        "engines = 7",
        "launch = 7",
    ],
)  # fmt: skip
def test_a_refused_value_is_not_missed(write: Write, text: str) -> None:
    """What is there but wrong is not reported as if it had not been given."""
    assert len(faults(write(text))) == 1


# --- secrets


@pytest.mark.parametrize(
    ("text", "env", "flags"),
    [
        ('api_keys = "s3cret"', {}, []),
        ('api_keys = ["s3cret", 5, ""]', {}, []),
        ("api_keys = { s3cret = 1 }", {}, []),
        ("", {"SPLITPROXY_API_KEYS": "s3cret,"}, []),
        ("", {}, ["api_keys=s3cret,"]),
        ('api_key = "s3cret"', {}, []),
        ('[[engines]]\nrole = "decode"\nurl = "http://me:s3cret@h:1"', {}, []),
        ('[[engines]]\nrole = "decode"\nurl = "ftp://me:s3cret@h:1/?q"', {}, []),
        ('[[engines]]\nrole = "decode"\nurl = "http://h:1"\napi_key = "s3cret"', {}, []),
        ('[[engines]]\nrole = "decode"\nurl = "http://h:1"\napi_key_env = "sk-s3cret"', {}, []),
    ],
)
def test_secrets_are_never_shown(write: Write, text: str, env: dict[str, str], flags: list[str]) -> None:
    """No sentence holds a key or password, wherever it was put by mistake."""
    path = write(text if "[[engines]]" in text else f"{text}\n{WRITER}")
    assert "s3cret" not in "\n".join(faults(path, env, flags))


# --- what counts


@pytest.mark.parametrize(
    ("env", "flags", "policy", "floor"),
    [
        ({}, [], Policy.NEVER, 10),
        ({"SPLITPROXY_SPLIT__POLICY": "always"}, [], Policy.ALWAYS, 10),
        ({"SPLITPROXY_SPLIT__POLICY": "always"}, ["split.policy=threshold"], Policy.THRESHOLD, 10),
        ({"SPLITPROXY_SPLIT__MIN_PROMPT_TOKENS": "20"}, ["split.policy=always"], Policy.ALWAYS, 20),
        ({}, ["split.policy=always", "split.policy=threshold"], Policy.THRESHOLD, 10),
        ({"OTHER": "x", "splitproxy_split__policy": "always"}, [], Policy.NEVER, 10),
    ],
)
def test_precedence(write: Write, env: dict[str, str], flags: list[str], policy: Policy, floor: int) -> None:
    """Flag before environment before file before default, key by key."""
    split = load(write(f'[split]\npolicy = "never"\nmin_prompt_tokens = 10\n{WRITER}'), env, flags).split
    assert (split.policy, split.min_prompt_tokens, split.probe_tokens) == (policy, floor, 512)


@pytest.mark.parametrize(("policy", "floor"), [(None, 32), ("auto", 32), ("threshold", 512), ("always", 32)])
def test_the_usual_floor_goes_by_the_policy(write: Write, policy: str | None, floor: int) -> None:
    """Where each prompt is weighed, few tokens are worth weighing; where none is, more must be new."""
    said = [] if policy is None else [f"split.policy={policy}"]
    assert load(write(WRITER), {}, said).split.floor_tokens == floor


@pytest.mark.parametrize(
    ("flag", "key", "value"),
    [
        ("keep_alive_s=2.5", "keep_alive_s", 2.5),
        ("keep_alive_s=7", "keep_alive_s", 7),
        ("insecure=true", "insecure", True),
        ("listen=127.0.0.1:9000", "listen", "127.0.0.1:9000"),
        ('listen="localhost:1"', "listen", "localhost:1"),
        (" listen =[::1]:1", "listen", "[::1]:1"),
        ("api_keys=one, two ,three", "api_keys", ("one", "two", "three")),
    ],
)
def test_settings_are_read_as_toml_or_text(write: Write, flag: str, key: str, value: object) -> None:
    """A setting from outside the file is what TOML would make of it, else plain text; keys are a list with commas."""
    assert getattr(load(write(WRITER), {}, [flag]), key) == value


def test_a_table_can_come_from_outside() -> None:
    """All of a launch can be set without a file."""
    found = load(None, {"SPLITPROXY_LAUNCH__MODEL": "m.gguf"}, ["launch.decode_slots=3", 'launch.args=["-v", 1, 2.5]'])
    assert found.launch is not None
    assert (found.launch.model, found.launch.decode_slots) == ("m.gguf", 3)
    assert found.launch.args == ("-v", "1", "2.5")


@pytest.mark.parametrize(("text", "value"), [("7", "7"), ("true", "true"), ("'7'", "7"), ("1e3", "1e3")])
def test_a_text_that_looks_like_a_number_stays_one(text: str, value: str) -> None:
    """Where a text belongs, nothing is taken for a number."""
    found = load(None, {"SPLITPROXY_LAUNCH__MODEL": text}, [])
    assert found.launch is not None
    assert found.launch.model == value


def test_an_engines_key_is_looked_up_in_the_given_environment(write: Write) -> None:
    """The variable must be in the environment that the configuration is read with."""
    text = f'{WRITER}api_key_env = "ENGINE_KEY"'
    assert load(write(text), {"ENGINE_KEY": "x"}).engines[0].api_key_env == "ENGINE_KEY"


# --- what is accepted


@pytest.mark.parametrize("card", ["3", 3])
def test_a_card_may_be_a_number_in_quotes(write: Write, card: object) -> None:
    """Cards are numbers, written with or without quotes."""
    found = load(write(f"{LAUNCH}prefill_gpu = {card!r}\ndecode_gpu = 0"), {})
    assert found.launch is not None
    assert (found.launch.prefill_gpu, found.launch.decode_gpu) == (3, 0)


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [("127.0.0.1:80", "127.0.0.1", 80), ("[::1]:0", "::1", 0), ("localhost:65535", "localhost", 65535),
     ("127.9.9.9:1", "127.9.9.9", 1)],
)  # fmt: skip
def test_loopback_needs_no_key(write: Write, listen: str, host: str, port: int) -> None:
    """An address that only this machine can reach may go without keys."""
    found = load(write(f'listen = "{listen}"\n{WRITER}'), {})
    assert (found.host, found.port) == (host, port)


@pytest.mark.parametrize("key", ['api_keys = ["k"]', "insecure = true"])
def test_an_open_address_needs_a_key_or_a_word(write: Write, key: str) -> None:
    """With a key, or where it is said to be meant, any address can be listened at."""
    assert load(write(f'listen = "0.0.0.0:80"\n{key}\n{WRITER}'), {}).host == "0.0.0.0"


def test_nameless_engines_are_named_by_role(write: Write) -> None:
    """Each engine has a name of its own: the role, numbered, never one that was given to another."""
    text = f'{WRITER}{READER}[[engines]]\nrole = "decode"\nurl = "http://h:3"\n'
    text += '[[engines]]\nrole = "decode"\nurl = "http://h:4"\nname = "decode-2"\n'
    found = load(write(text), {})
    assert [engine.name for engine in found.engines] == ["decode", "prefill", "decode-3", "decode-2"]
    assert [engine.name for engine in found.of_role(Role.DECODE)] == ["decode", "decode-3", "decode-2"]


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("http://h:1/", "http://h:1"),
        ("https://h/base/path/", "https://h/base/path"),
        ("http://[::1]:5", "http://[::1]:5"),
    ],
)
def test_an_engines_address_keeps_its_path(write: Write, url: str, kept: str) -> None:
    """A path before the endpoints stays; a slash at its end does not."""
    assert load(write(f'[[engines]]\nrole = "decode"\nurl = "{url}"'), {}).engines[0].url == kept


def test_an_engine_may_be_a_process_of_ours(write: Write) -> None:
    """A Strata engine that reads for a server of its kind has no address; a number among its arguments is a word."""
    text = STDIO + 'args = ["--max-context", 32768]\nenv = { N = 1 }\n' + STRATA + '[tokenizer]\nsource = "t.json"'
    found = load(write(text), {})
    reader, writer = found.engines
    assert reader.process is not None
    assert (reader.process.args, reader.process.env) == (("--max-context", "32768"), {"N": "1"})
    assert (reader.url, reader.place, writer.place) == ("", "/opt/strata", "http://127.0.0.1:8095")


def test_a_configuration_does_not_change(write: Write) -> None:
    """A configuration is read once and stays as it was read."""
    found = load(write(WRITER), {})
    with pytest.raises(ValueError, match="frozen"):
        found.listen = "x"


VALUES = st.one_of(
    st.sampled_from(["x", "decode", "prefill", "http://h:1", "0.0.0.0:1", "never", ""]),
    st.integers(-2, 70),
    st.booleans(),
    st.sampled_from([1.5, float("inf"), float("nan")]),
)
TABLES = (Config, config.Split, config.Queue, config.Engine, config.Process, config.Launch)
KEYS = sorted({name for table in TABLES for name in table.model_fields} | {"nope"})
TREES = st.recursive(
    VALUES,
    lambda inner: st.dictionaries(st.sampled_from(KEYS), inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=12,
)


@given(tree=st.dictionaries(st.sampled_from(KEYS), TREES, max_size=6))
def test_anything_is_a_configuration_or_a_list_of_sentences(tree: dict[str, Any]) -> None:
    """Whatever a file holds, the start ends with sentences or goes on; it never ends in a traceback."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "_read_file", lambda _path: tree)
        try:
            load(Path("f.toml"), {})
            return
        except ConfigError as error:
            found = error.faults
    assert found
    assert len(set(found)) == len(found)
    assert all(re.match(r"f\.toml: \S", fault) for fault in found)
