"""Every way in which reprieve refuses or fails, as classes that carry the numbers.

`args` of an exception are its numbers, so that it can be raised from Rust and pickled; `str()` writes the sentence.
Nobody recognises a failure by its text.
"""

from __future__ import annotations


class ReprieveError(Exception):
    """Anything that reprieve raises on purpose."""


class InvalidRequest(ReprieveError, ValueError):
    """A request, or an argument, that cannot be served as it is.

    Raised before anything changed. `field` names the argument, `problem` says what is wrong with it, numbers included.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class NeverFits(InvalidRequest):
    """A prompt that needs more KV blocks than the whole pool has."""

    def __init__(self, field: str, needed: int, total: int) -> None:
        ReprieveError.__init__(self, field, needed, total)
        self.field = field
        self.needed = needed
        self.total = total
        self.problem = f"needs {needed} KV blocks, the pool has {total} in all"


class UnknownRequest(ReprieveError, KeyError):
    """No such request is live: it was never submitted, or has ended and been forgotten."""

    def __init__(self, request_id: object) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"no live request has the id {self.request_id!r}"


class RequestFinished(ReprieveError):
    """The request has already ended."""

    def __init__(self, request_id: object) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"request {self.request_id!r} has already ended"


class StepInFlight(ReprieveError):
    """A launched step that is not settled yet still needs this sequence."""

    def __init__(self, seq: int) -> None:
        super().__init__(seq)
        self.seq = seq

    def __str__(self) -> str:
        return f"sequence {self.seq} is part of a step that is not settled yet; settle it first"


class BooksMisused(ReprieveError, RuntimeError):
    """A call on the books that is not allowed in the present state, such as a commit with no step in flight."""


class CannotPark(ReprieveError):
    """Neither way of parking is open: the sequence is not replayable and its image does not fit the host budget."""

    def __init__(self, seq: int, reason: str) -> None:
        super().__init__(seq, reason)
        self.seq = seq
        self.reason = reason

    def __str__(self) -> str:
        return f"sequence {self.seq} cannot be parked: {self.reason}"


class EngineClosed(ReprieveError, RuntimeError):
    """The engine was closed, or its device is lost; it takes no more work. `args` hold the reason."""


class KvExhausted(ReprieveError):
    """The decode rows of a step need `needed` more KV blocks and only `free` are free. Park someone and try again."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)
        self.needed = needed
        self.free = free

    def __str__(self) -> str:
        return f"the step needs {self.needed} KV blocks, {self.free} are free"


class RowFailed(ReprieveError):
    """One row of a step cannot be computed. That row ends with `code`; the others are launched again.

    `row` is the row's index in the step that was being launched; `code` is a finish reason.
    """

    def __init__(self, row: int, code: str = "step_failed") -> None:
        super().__init__(row, code)
        self.row = row
        self.code = code

    def __str__(self) -> str:
        return f"row {self.row} of the step failed ({self.code})"


class StepFailed(ReprieveError):
    """A step could not be computed, and the device still works. The rows of that step end, nobody else notices."""


class DeviceLost(ReprieveError):
    """The device no longer answers its probe. Every live request ends, new ones are refused."""


class HostStoreFull(ReprieveError):
    """A spilled image of `needed` bytes does not fit the `free` bytes that are left of the host budget."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free)
        self.needed = needed
        self.free = free

    def __str__(self) -> str:
        return f"an image of {self.needed} bytes does not fit the {self.free} free bytes of the host budget"


class ImageCorrupt(ReprieveError):
    """A spilled image is missing, or its header or checksum is not what was written."""

    def __init__(self, seq: int, problem: str) -> None:
        super().__init__(seq, problem)
        self.seq = seq
        self.problem = problem

    def __str__(self) -> str:
        return f"the spilled image of sequence {self.seq}: {self.problem}"


class ModelFileError(ReprieveError, ValueError):
    """A model file that is damaged, incomplete or of a kind that is not supported."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(str(path), problem)
        self.path = str(path)
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class UnsupportedTokenizer(ModelFileError):
    """The file's vocabulary says it is split in a way that is not known here; guessing would change tokens."""
