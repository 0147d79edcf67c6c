"""Tables of configuration, whatever file they come from: the kinds of their values, and every fault at once.

It knows no key of any table.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

Checked = TypeVar("Checked", bound=BaseModel)

_LACKS = "lacks"


def refuse_bool(value: object) -> object:
    """For the kinds of numbers, before pydantic looks at a value."""
    # For pydantic True is the number 1; in a configuration it is a mistake.
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, BeforeValidator(refuse_bool), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1)]
Seconds = Annotated[float, BeforeValidator(refuse_bool), Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Argument = Annotated[str, BeforeValidator(lambda v: str(v) if type(v) in (int, float) else v), Field(strict=True)]


class Table(BaseModel):
    """A table of a configuration file: frozen, and without room for keys that do nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def lacks(key: str) -> PydanticCustomError:
    """What a table's own validator raises where a key is missing that other keys make necessary."""
    return PydanticCustomError(_LACKS, "{key} is missing", {"key": key})


def sound_part(
    model: type[Checked], tree: dict[str, Any], faults: list[str], sentence: Callable[[ErrorDetails], str]
) -> tuple[Checked, set[str]]:
    """Note every fault and take it out of `tree`, so that what is left can be checked further.

    Every key at the top of `model` needs a default. Returns what is left, and the keys at the top that lost something.
    """
    doubtful: set[str] = set()
    while True:
        try:
            return model.model_validate(tree), doubtful
        except ValidationError as error:
            errors = error.errors(include_url=False)
        # What is missing later on has been taken out before.
        sentences = [sentence(error) for error in errors if not doubtful or error["type"] not in ("missing", _LACKS)]
        faults += [text for text in sentences if text not in faults]
        doubtful |= {str(error["loc"][0]) for error in errors}
        _remove(tree, errors[-1])  # the last, so that the places of the others stay true


def _remove(tree: Any, error: ErrorDetails) -> None:
    """Take a faulty value out; a table that lacks a value goes as a whole."""
    place = _place(error)
    *above, last = place[:-1] if error["type"] == "missing" else place
    for part in above:
        tree = tree[part]
    del tree[last]


def _place(error: ErrorDetails) -> tuple[int | str, ...]:
    return tuple(part for part in error["loc"] if not str(part).startswith("function-"))


def fault_sentence(
    model: type[BaseModel],
    error: ErrorDetails,
    default: str,
    origin: Mapping[tuple[str, ...], str] | None = None,
    secret: Collection[str] = (),
) -> str:
    """One of pydantic's errors in a sentence that names where it was read, key and value.

    `default` is the source of all keys that `origin` does not name. Values of the top keys in `secret` are not shown,
    nor are addresses that may hold a password.
    """
    place = _place(error)
    keys = tuple(str(part) for part in place)
    sources = origin or {}
    source = next((sources[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in sources), default)
    key = ".".join(keys)
    if error["type"] == "extra_forbidden":
        known = sorted(table_at(model, place[:-1]).model_fields)
        near = difflib.get_close_matches(keys[-1], known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{source}: unknown key {key}; {hint}known keys here: {', '.join(known)}"
    if error["type"] == "missing":
        return f"{source}: {key} is missing"
    if error["type"] == _LACKS:
        return f"{source}: {key}.{error['msg']}"
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "should")
    hidden = keys[0] in secret or (keys[-1] == "url" and "@" in str(error["input"]))
    if hidden or isinstance(error["input"], dict | list):
        return f"{source}: {key}: {message}"
    return f"{source}: {key} = {error['input']!r}: {message}"


def table_at(model: type[BaseModel], place: Iterable[int | str]) -> type[BaseModel]:
    """The table that a place in a file belongs to; where it leads nowhere, the last one on the way."""
    for part in place:
        if isinstance(part, str) and part in model.model_fields:
            kinds = _kinds(model.model_fields[part].annotation)
            model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), model)
    return model


def _kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)
