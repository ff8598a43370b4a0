"""What a request says about what may be generated and how long it may be parked: what is kept, what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reprieve import Request
from reprieve.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray


def nothing(generated: tuple[int, ...]) -> NDArray[np.uint32] | None:
    return np.zeros(1, np.uint32)


async def later(generated: tuple[int, ...]) -> None:
    return None


@dataclass
class Matcher:
    """A mask that is an object and, as it can be changed and compared, has no hash."""

    state: int = 0

    def __call__(self, generated: tuple[int, ...]) -> NDArray[np.int32] | None:
        self.state += 1
        return None


def test_a_request_restrains_nothing_unless_told_to() -> None:
    request = Request((1,))
    assert (request.mask, request.think_tokens, request.max_pause_s) == (None, None, None)
    assert (request.min_tokens, request.banned_token_ids) == (0, ())


def test_what_is_given_is_kept_as_plain_numbers() -> None:
    request = Request(
        (1,),
        mask=nothing,
        min_tokens=np.int64(3),  # type: ignore[arg-type]
        banned_token_ids=(n for n in (5, 6)),  # type: ignore[arg-type]
        think_tokens=np.array([8, 9], np.int32),  # type: ignore[arg-type]
        max_pause_s=2,
    )
    assert request.mask is nothing
    assert (request.min_tokens, request.banned_token_ids, request.think_tokens) == (3, (5, 6), (8, 9))
    assert (request.max_pause_s, type(request.max_pause_s), type(request.min_tokens)) == (2.0, float, int)
    assert [type(token_id) for token_id in (*request.banned_token_ids, *(request.think_tokens or ()))] == [int] * 4
    assert replace(request, priority=1).think_tokens == (8, 9)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mask": 5}, "mask: must be None or a function that is not asynchronous, not 5"),
        ({"mask": np.zeros(1, np.uint32)}, "mask: must be None or a function"),
        ({"mask": later}, "mask: must be None or a function that is not asynchronous"),
        ({"min_tokens": -1}, "min_tokens: must be an integer of at least 0, not -1"),
        ({"min_tokens": None}, "min_tokens: must be an integer, not None"),
        ({"min_tokens": True}, "min_tokens: must be an integer, not True"),
        ({"min_tokens": 5, "max_new_tokens": 4}, "min_tokens: is 5, above max_new_tokens, 4"),
        ({"min_tokens": 129}, "min_tokens: is 129, above max_new_tokens, 128"),
        ({"banned_token_ids": 3}, "banned_token_ids: must be a sequence of token ids, not 3"),
        ({"banned_token_ids": {3}}, "banned_token_ids: must be a sequence"),
        ({"banned_token_ids": (1, "a")}, r"banned_token_ids\[1\]: must be an integer, not 'a'"),
        ({"banned_token_ids": range(17)}, "banned_token_ids: are 17 ids; at most 16 can be"),
        (
            {"banned_token_ids": range(15), "think_tokens": (20, 21)},
            "banned_token_ids: are 17 ids, think_tokens included; at most 16 can be",
        ),
        (
            {"min_tokens": 1, "stop_token_ids": range(17)},
            "min_tokens: keeps stop_token_ids away, 17 ids with the banned ones; at most 16 can be",
        ),
        ({"think_tokens": 7}, "think_tokens: must be a sequence of token ids, not 7"),
        ({"think_tokens": (7,)}, r"think_tokens: must be two ids that differ, start and end, not \(7,\)"),
        ({"think_tokens": (7, 7)}, r"think_tokens: must be two ids that differ, start and end, not \(7, 7\)"),
        ({"think_tokens": (7, 8, 8)}, "think_tokens: must be two ids that differ"),
        ({"think_tokens": (7, None)}, r"think_tokens\[1\]: must be an integer, not None"),
        ({"max_pause_s": 0}, "max_pause_s: must be more than 0 seconds, not 0"),
        ({"max_pause_s": float("nan")}, "max_pause_s: must be more than 0 seconds, not nan"),
        ({"max_pause_s": "long"}, "max_pause_s: must be a number of seconds, not 'long'"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{named}"):
        Request((1,), **fields)


def test_as_many_tokens_as_the_budget_may_be_asked_for_and_any_number_without_one() -> None:
    assert Request((1,), min_tokens=4, max_new_tokens=4).min_tokens == 4
    assert Request((1,), min_tokens=2**40, max_new_tokens=None).min_tokens == 2**40


def test_bans_are_counted_once_each_and_stop_ids_only_while_they_are_kept_away() -> None:
    Request((1,), banned_token_ids=range(16), think_tokens=(3, 4), stop_token_ids=(5, 6), min_tokens=1)
    Request((1,), banned_token_ids=range(16), stop_token_ids=range(40))
    with pytest.raises(InvalidArgument, match=r"min_tokens: .* 17 ids"):
        Request((1,), banned_token_ids=range(16), stop_token_ids=(16,), min_tokens=1)


def test_requests_are_compared_and_hashed_whatever_their_mask_is() -> None:
    matcher = Matcher()
    first, second = (Request((1,), mask=matcher, banned_token_ids=[2]) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != Request((1,), mask=Matcher(3), banned_token_ids=[2])
    assert {first: "found"}[second] == "found"
