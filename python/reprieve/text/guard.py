"""What a model's files make a library do, as a refusal that names the file."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reprieve.errors import ModelFileError, ReprieveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@contextmanager
def library_guard(refuse: Callable[[str], ReprieveError], problem: str) -> Iterator[None]:
    """Turn whatever the tokenizers library raises inside the block into `refuse` of `problem` and its words.

    The library raises nothing narrower than `Exception`, and where its own code panics over a file's data, what comes
    out is not even an `Exception`.
    """
    try:
        yield
    except (ReprieveError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as failure:
        raise refuse(f"{problem}: {failure}") from failure


def parse_json_object(path: Path, source: str) -> dict[str, Any]:
    """Return the JSON object `source`, the text of the file at `path`.

    Raises `ModelFileError` where it is anything else, or has a key twice: readers differ in which one they take.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            counts = Counter(key for key, _ in pairs)
            raise ModelFileError(path, f"has the key {counts.most_common(1)[0][0]!r} twice in one object")
        return values

    try:
        value = json.loads(source, object_pairs_hook=unique)
    except ModelFileError:
        raise
    except (ValueError, RecursionError) as failure:  # not JSON, a number of thousands of digits, nested too deeply
        raise ModelFileError(path, f"is not JSON: {failure}") from failure
    if not isinstance(value, dict):
        raise ModelFileError(path, f"holds a {type(value).__name__}, not an object")
    return value
