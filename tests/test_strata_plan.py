"""What is read before Strata's engines are started: the run config's file, where it leads, what it tells the proxy."""

import json
from pathlib import Path
from typing import Any

import pytest

from splitproxy.config import Config
from splitproxy.errors import ConfigError
from tests.strata_bench import StrataBench


@pytest.fixture
def bench(tmp_path: Path) -> StrataBench:
    bench = StrataBench(tmp_path)
    bench.write()
    return bench


def faults(bench: StrataBench, **strata: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        bench.plan(**strata)
    return caught.value.faults


def applied(bench: StrataBench, strata: dict[str, Any] | None = None, **tables: Any) -> Config:
    found = bench.plan(**(strata or {}))
    return found.applied(Config.model_validate(bench.config(**(strata or {})).model_dump(exclude_unset=True) | tables))


def test_run_config_leads_to_the_checkout(bench: StrataBench) -> None:
    """Without strata.dir the servers run where the run config lies, and a command with a / is looked up there."""
    found = bench.plan()
    assert (found.base, found.home) == (bench.checkout, bench.checkout)
    assert found.program == (str(bench.checkout / "serve"),)
    assert bench.plan(command=["sh", "-c", 1]).program[1:] == ("-c", "1")


def test_cwd_of_the_run_config(bench: StrataBench) -> None:
    """The run config's paths are relative to its cwd, and that to the folder where the servers run."""
    (bench.checkout / "engine").mkdir()
    (bench.checkout / "engine" / "strata").touch()
    bench.write(cwd="engine", args=["--pack", "../../pack"])
    found = bench.plan()
    assert found.home == bench.checkout / "engine"
    assert found.pack is not None
    assert found.pack.samefile(bench.pack)


def test_every_fault_at_once(bench: StrataBench) -> None:
    """S1: what is wrong with [strata], the run config and the files that it names is said together."""
    bench.write({"decode_gpu": True}, parallel=2)
    assert [fault.partition(" = ")[0] for fault in faults(bench, dir="/nowhere", command=["./missing"])] == [
        "strata.dir", "strata.command", "strata-x.json: split_serve.decode_gpu", "strata-x.json: parallel",
    ]  # fmt: skip
    bench.write({"shared_arena": "nowhere/arena"}, exe="missing")
    assert [fault.partition(" = ")[0] for fault in faults(bench)] == [
        "strata-x.json: exe", "strata-x.json: split_serve.shared_arena",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot be read: No such file"), ("{", "is not valid JSON: "), ("[]", "one JSON object")],
)
def test_file_that_is_no_run_config(bench: StrataBench, content: str | None, reason: str) -> None:
    """A file that is missing, broken or something else is named with the reason."""
    bench.run_config.write_text(content) if content else bench.run_config.unlink()
    (fault,) = faults(bench)
    assert "strata-x.json" in fault
    assert reason in fault


def test_mark_of_an_editor(bench: StrataBench) -> None:
    """A file that begins with a byte order mark is read like any other."""
    bench.run_config.write_bytes(b"\xef\xbb\xbf" + bench.run_config.read_bytes())
    assert bench.plan().run.split.prefill_gpu == 3


def test_s3_s4_the_proxy_takes_what_the_section_says(bench: StrataBench) -> None:
    """S3, S4: min_prompt_tokens and dir of the section are the proxy's; a relative dir is the run config's."""
    bench.write({"dir": "sessions"})
    split = applied(bench).split
    assert (split.min_prompt_tokens, split.dir) == (500, str(bench.checkout / "sessions"))


def test_the_proxy_s_own_configuration_wins(bench: StrataBench) -> None:
    """What the proxy's configuration says, by file, environment or command line, wins over the section."""
    bench.write({"dir": "/elsewhere"})
    split = applied(bench, split={"min_prompt_tokens": 2048, "dir": "/mine"}).split
    assert (split.min_prompt_tokens, split.dir) == (2048, "/mine")


def test_keys_of_clients(bench: StrataBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients go on showing the keys that they showed to Strata, unless the proxy has keys of its own."""
    monkeypatch.setenv("STRATA_API_KEY", "three")
    assert applied(bench).api_keys == ("three",)
    bench.write(api_key="one, two")
    assert applied(bench).api_keys == ("one", "two")
    assert applied(bench, api_keys=["mine"]).api_keys == ("mine",)


@pytest.mark.parametrize("prefill", ["server", "stdio"])
def test_token_ids_from_the_model_s_own_files(bench: StrataBench, prefill: str) -> None:
    """The tokenizer's folder, else the model file, makes the token ids, unless another source is named."""
    model = bench.folder / "model.gguf"
    model.touch()
    bench.write(args=["--native", str(model)], tokenizer=str(bench.pack))
    strata = {"prefill": prefill}
    assert applied(bench, strata).tokenizer.source == str(model)
    (bench.pack / "tokenizer.json").write_text(json.dumps({}))
    assert applied(bench, strata).tokenizer.source == str(bench.pack / "tokenizer.json")
    assert applied(bench, strata, tokenizer={"source": "/mine"}).tokenizer.source == "/mine"


def test_stdio_needs_token_ids(bench: StrataBench) -> None:
    """An engine on stdio is refused where no file makes token ids; a server can do without."""
    assert applied(bench).tokenizer.source == "auto"
    with pytest.raises(ConfigError, match=r'strata.prefill = "stdio".*there is no .*tokenizer.json; name the model'):
        applied(bench, {"prefill": "stdio"})
    with pytest.raises(ConfigError, match=r"tokenizer.source is 'engine'"):
        applied(bench, {"prefill": "stdio"}, tokenizer={"source": "engine"})
