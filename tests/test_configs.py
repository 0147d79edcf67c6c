"""The files in configs/: each loads, the reference is complete and true, and compose.yaml agrees with compose.toml.

`engine_command` is what tests/image_test.sh starts its engines with, so that the flags we ship are the ones that run.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import pytest
import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from splitproxy.config import Config, load
from splitproxy.model import Role
from splitproxy.run.flags import launch_faults
from splitproxy.run.strata.runconfig import parse

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
REFERENCE = CONFIGS / "reference.toml"
KEYS = {"SPLITPROXY_API_KEYS": "one,two"}
MUST_BE_GIVEN = {"MODEL_DIR": "/srv/models", "MODEL": "model.gguf", **KEYS}


def compose(env: Mapping[str, str]) -> dict[str, Any]:
    """configs/compose.yaml with its variables put in, as `docker compose config` would show it."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if name in env:
            return env[name]
        if operator == ":-":
            return str(rest)
        raise KeyError(f"{name}: {rest}")

    text = (CONFIGS / "compose.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(re.sub(r"\$\{(\w+)(:[-?])([^}]*)\}", value, text)))


def engine_command(service: str, *, model: Path, sessions: Path, port: int) -> list[str]:
    """The flags of one engine of compose.yaml, for an engine on this machine."""
    command = compose({**MUST_BE_GIVEN})["services"][service]["command"]
    here = {"--host": "127.0.0.1", "--port": str(port), "--model": str(model), "--slot-save-path": str(sessions)}
    return [here.get(before, str(word)) for before, word in zip([None, *command], command, strict=False)]


def flags(service: Mapping[str, Any]) -> dict[str, str | None]:
    """Flag -> value, None for a flag that takes none."""
    command = [str(word) for word in service["command"]]
    following = [*command[1:], "--"]
    return {
        word: None if after.startswith("--") else after
        for word, after in zip(command, following, strict=True)
        if word.startswith("--")
    }


@pytest.fixture
def services() -> dict[str, dict[str, Any]]:
    return dict(compose(MUST_BE_GIVEN)["services"])


@pytest.fixture
def proxy() -> Config:
    return load(CONFIGS / "compose.toml", KEYS)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_each_configuration_loads(path: Path) -> None:
    """What we ship starts as it stands; compose.toml with the keys that compose.yaml insists on."""
    load(path, KEYS if path.name == "compose.toml" else {})


@pytest.mark.parametrize("name", ["reference.toml", "two-gpus.toml"])
def test_the_engines_could_be_started(name: str) -> None:
    """What [launch] gives the engines does not contradict a handover."""
    launch = load(CONFIGS / name, {}).launch
    assert launch
    assert launch_faults(launch) == []


def test_the_run_config_could_be_started() -> None:
    """The run config for Strata excludes no pair, and is the one that strata.toml names."""
    run = parse(json.loads((CONFIGS / "strata-model.json").read_text(encoding="utf-8")), "strata-model.json")
    assert run.split.card(Role.PREFILL) != run.split.card(Role.DECODE)
    strata = load(CONFIGS / "strata.toml", {}).strata
    assert strata
    assert Path(strata.config).name == "strata-model.json"


# --- reference.toml


def leaves(model: type[BaseModel], place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, field in model.model_fields.items():
        table = next((t for t in parts(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)), None)
        if table is None:
            yield (*place, name), field
        else:
            yield from leaves(table, (*place, name))


def parts(annotation: Any) -> Iterator[Any]:
    """The types that a field's annotation is made of."""
    yield annotation
    if get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from parts(part)


def words(field: FieldInfo) -> Iterator[str]:
    """The words that a field of a closed set allows."""
    for part in parts(field.annotation):
        if get_origin(part) is Literal:
            yield from get_args(part)
        elif isinstance(part, type) and issubclass(part, StrEnum):
            yield from part


def described(place: tuple[str, ...]) -> str:
    """The comment above a key in reference.toml, within the key's table. A key without a default is commented out."""
    lines = REFERENCE.read_text(encoding="utf-8").splitlines()
    if len(place) > 1:
        lines = lines[next(n for n, line in enumerate(lines) if line.strip("[]") == place[0]) :]
    at = next(n for n, line in enumerate(lines) if re.match(rf"(# )?{place[-1]} = ", line))
    start = at
    while start and lines[start - 1] and not lines[start - 1].startswith("["):
        start -= 1
    return "\n".join(line for line in lines[start:at] if line.startswith("# "))


def in_file(place: tuple[str, ...]) -> Any:
    found: Any = tomllib.loads(REFERENCE.read_text(encoding="utf-8"))
    for key in place:
        found = found[0] if isinstance(found, list) else found
        found = found[key]
    return found


LEAVES = list(leaves(Config))


@pytest.mark.parametrize(("place", "field"), LEAVES, ids=[".".join(place) for place, _ in LEAVES])
def test_reference_tells_the_truth_about_each_key(place: tuple[str, ...], field: FieldInfo) -> None:
    """Each key stands in reference.toml with its default, its words or its lowest value."""
    told = described(place)
    assert told
    if stands(place, field):
        assert in_file(place)
    elif can_be_written(field) and not instead_of_url(place):
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        assert in_file(place) == default
    else:
        with pytest.raises(KeyError):
            in_file(place)
    for word in words(field):
        assert re.search(rf"\b{word}\b", told), word
    for limit in limits(field):
        assert limit in told


def stands(place: tuple[str, ...], field: FieldInfo) -> bool:
    """Whether an example of a value must stand there: the key has no default, or none that is of use."""
    return place == ("engines", "url") or (field.is_required() and not instead_of_url(place))


def instead_of_url(place: tuple[str, ...]) -> bool:
    """Whether a key belongs to the table that excludes `url`: all of it is commented out."""
    return place[:2] == ("engines", "process")


def can_be_written(field: FieldInfo) -> bool:
    """Whether the default is a value that a file may hold; else leaving the key out is the only way to say it."""
    if field.default is None:
        return False
    annotation: Any = Annotated[field.annotation, field]
    try:
        TypeAdapter(annotation).validate_python(field.default)
    except ValidationError:
        return False
    return True


def limits(field: FieldInfo) -> Iterator[str]:
    """How the lowest value is worded, for a number that has one."""
    constraints = [*field.metadata]
    for part in parts(field.annotation):
        for inner in getattr(part, "__metadata__", ()):
            constraints += getattr(inner, "metadata", [inner])
    for constraint in constraints:
        if (at_least := getattr(constraint, "ge", None)) is not None:
            yield f"At least {at_least}"
        if (above := getattr(constraint, "gt", None)) is not None:
            yield f"Above {above}"


def test_reference_names_no_key_twice() -> None:
    """A second, commented value beside the true one would be believed."""
    keys = re.findall(r"^# (\w+) = ", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert keys == [
        place[-1]
        for place, field in LEAVES
        if instead_of_url(place) or not (stands(place, field) or can_be_written(field))
    ]


# --- compose.yaml and compose.toml


def test_one_session_folder_everywhere(services: dict[str, dict[str, Any]], proxy: Config) -> None:
    """What one engine saves, the proxy checks and the other engine reads, is the same file."""
    volume = f"sessions:{proxy.split.dir}"
    for name in ("reader", "writer", "proxy"):
        assert volume in services[name]["volumes"]
    for name in ("reader", "writer"):
        assert flags(services[name])["--slot-save-path"] == proxy.split.dir


def test_session_folder_is_ram_and_private(services: dict[str, dict[str, Any]]) -> None:
    """Session files are as private as the prompts: one user owns the folder, and all three run as that user."""
    options = compose(MUST_BE_GIVEN)["volumes"]["sessions"]["driver_opts"]
    mount = dict(option.split("=") for option in options["o"].split(","))
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    user = re.search(r"^USER (.+)$", dockerfile, re.MULTILINE)
    assert user
    assert options["type"] == "tmpfs"
    assert mount["mode"] == "0700"
    assert f"{mount['uid']}:{mount['gid']}" == user[1]
    assert {services[name]["user"] for name in ("reader", "writer")} == {user[1]}
    assert "user" not in services["proxy"]


def test_each_engine_is_where_the_proxy_looks(services: dict[str, dict[str, Any]], proxy: Config) -> None:
    """Ports, addresses and health checks of the engines are those that the proxy is told."""
    for engine in proxy.engines:
        address = urlsplit(engine.url)
        service = services[str(address.hostname)]
        assert flags(service)["--port"] == str(address.port)
        assert flags(service)["--host"] == "0.0.0.0"
        assert service["healthcheck"]["test"][-1] == f"http://127.0.0.1:{address.port}/health"


def test_only_the_proxy_is_reachable_and_only_from_this_machine(
    services: dict[str, dict[str, Any]], proxy: Config
) -> None:
    """One port is published, on the loopback address."""
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"proxy": [f"127.0.0.1:8080:{proxy.port}"]}
    assert all("network_mode" not in service for service in services.values())


def test_the_proxy_does_not_start_without_keys() -> None:
    """What can be reached by others asks for keys, and says where to put them."""
    with pytest.raises(KeyError, match="SPLITPROXY_API_KEYS: the keys that clients must show"):
        compose({name: value for name, value in MUST_BE_GIVEN.items() if name not in KEYS})


def test_engines_have_what_a_handover_needs(services: dict[str, dict[str, Any]]) -> None:
    """Both engines read and write the same session files, and the decode engine keeps what it restores."""
    reader, writer = flags(services["reader"]), flags(services["writer"])
    for same in ("--model", "--flash-attn", "--cache-type-k", "--cache-type-v"):
        assert reader[same] == writer[same]
    assert services["reader"]["image"] == services["writer"]["image"]
    assert reader["--parallel"] == "1"
    assert reader["--batch-size"] == "512"
    assert reader["--ctx-checkpoints"] == "3"
    assert "--kv-unified" in writer
    assert writer["--cache-ram"] == "0"
    assert writer["--ctx-checkpoints"] == "4"
    assert int(str(writer["--ctx-size"])) >= int(str(reader["--ctx-size"]))
    assert {"--slots", "--metrics"} <= reader.keys() & writer.keys()


def test_each_engine_has_a_card_of_its_own(services: dict[str, dict[str, Any]]) -> None:
    """Two engines on one card would wait for each other."""
    cards = []
    for name in ("reader", "writer"):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        cards += device["device_ids"]
    assert len(set(cards)) == 2


def test_running_answers_end_before_the_container_is_killed(services: dict[str, dict[str, Any]], proxy: Config) -> None:
    """The proxy has more time to stop than its answers have to end."""
    assert proxy.drain_s < int(services["proxy"]["stop_grace_period"].removesuffix("s"))


def test_files_that_compose_mounts_exist(services: dict[str, dict[str, Any]]) -> None:
    """Docker would make a folder of a file that is not there."""
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (CONFIGS / source).is_file(), volume


def test_prometheus_asks_services_that_exist(services: dict[str, dict[str, Any]], proxy: Config) -> None:
    """Every target is a service of the compose file, at its port."""
    scrape = yaml.safe_load((CONFIGS / "prometheus.yml").read_text(encoding="utf-8"))
    targets = {
        target for job in scrape["scrape_configs"] for group in job["static_configs"] for target in group["targets"]
    }
    assert targets == {f"proxy:{proxy.port}", *(urlsplit(engine.url).netloc for engine in proxy.engines)}
    assert {target.partition(":")[0] for target in targets} < services.keys()


def test_minimal_names_both_roles_and_nothing_that_has_a_default() -> None:
    """The smallest configuration is no longer than it must be."""
    config = load(CONFIGS / "minimal.toml", {})
    assert [engine.role for engine in config.engines] == [Role.PREFILL, Role.DECODE]
    named = tomllib.loads((CONFIGS / "minimal.toml").read_text(encoding="utf-8"))
    assert named.keys() == {"split", "engines"}
