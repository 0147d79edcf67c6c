"""A tokenizer source to a vocabulary, whatever the kind of file."""

from collections.abc import Mapping
from pathlib import Path

from splitproxy.errors import ConfigError
from splitproxy.tokens import gguf_file, hf_file, rank_file
from splitproxy.tokens.patterns import PATTERNS
from splitproxy.tokens.vocabulary import BrokenFile, Vocabulary

TIKTOKEN = "tiktoken:"  # in front of the name of one of its encodings


def read(source: str, family: str, special: Mapping[str, int]) -> Vocabulary:
    """The vocabulary of a source: a GGUF file, a tokenizer.json, a rank file, or `tiktoken:NAME`.

    Raises ConfigError, with one sentence, where the source is broken, and UnsupportedVocabulary where it is sound and
    yet of no use here.
    """
    if family and family not in PATTERNS:
        raise ConfigError([f"tokenizer.pattern = {family!r}: must be one of {', '.join(sorted(PATTERNS))}"])
    try:
        if source.startswith(TIKTOKEN):
            return rank_file.named(source.removeprefix(TIKTOKEN), family, special)
        return _read_file(Path(source), family, special)
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
    except BrokenFile as error:
        reason = str(error)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        reason = f"is damaged: it holds what no such file holds ({type(error).__name__})"
    raise ConfigError([f"tokenizer: {source}: {reason}"])


def _read_file(path: Path, family: str, special: Mapping[str, int]) -> Vocabulary:
    if not path.is_file():
        raise BrokenFile("cannot be read: " + ("it is no file" if path.exists() else "there is no such file"))
    with path.open("rb") as file:
        beginning = file.read(64)
    if beginning.startswith(gguf_file.MAGIC):
        return gguf_file.read(path)
    if path.suffix == ".json" or beginning.lstrip()[:1] == b"{":
        return hf_file.read(path, family)
    if path.suffix == ".gguf":
        raise BrokenFile("is no GGUF file")
    return rank_file.read(path, family, special)
