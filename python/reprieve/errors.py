"""Every way in which reprieve refuses or fails, as classes that carry the numbers.

`args` of an exception are its numbers, so that it can be raised from Rust and pickled; `str()` writes the sentence.
Nobody recognises a failure by its text.
"""

from __future__ import annotations


class ReprieveError(Exception):
    """Anything that reprieve raises on purpose."""


class InvalidArgument(ReprieveError, ValueError):
    """A request, or an argument, that cannot be served as it is.

    Raised before anything changed. `field` names the argument, `problem` says what is wrong with it, numbers included.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class NeverFits(InvalidArgument):
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
    """A launched step that is not settled yet still needs this sequence: its image cannot be forgotten now."""

    def __init__(self, seq: int) -> None:
        super().__init__(seq)
        self.seq = seq

    def __str__(self) -> str:
        return f"sequence {self.seq} is part of a step that is not settled yet; settle it first"


class BooksMisused(ReprieveError, RuntimeError):
    """A call on the books that is not allowed in the present state, such as a commit with no step in flight.

    Also raised where books of somebody's own break their promises, such as a victim that is not resident.
    """


class CannotPark(ReprieveError):
    """That way of parking is not open to the sequence, or neither is.

    It is not resident; or it is not replayable and its image does not fit the host budget; or nothing is committed, so
    that there is no image. `seq` is the sequence, or from an engine the id of the request.
    """

    def __init__(self, seq: int | str, reason: str) -> None:
        super().__init__(seq, reason)
        self.seq = seq
        self.reason = reason

    def __str__(self) -> str:
        who = f"request {self.seq!r}" if isinstance(self.seq, str) else f"sequence {self.seq}"
        return f"{who} cannot be parked: {self.reason}"


class EngineBusy(ReprieveError, RuntimeError):
    """Another thread is inside the engine; it is used from one thread at a time. Nothing has changed."""

    def __str__(self) -> str:
        return "another thread is using the engine; call it from one thread at a time"


class EngineClosed(ReprieveError, RuntimeError):
    """The engine was closed; it takes no more work."""


class EngineForked(ReprieveError, RuntimeError):
    """This process is a fork of the one in which the engine decodes. Make an engine here. Nothing has changed."""

    def __str__(self) -> str:
        return "the engine's thread is in the process that this one was forked from; make an engine in this one"


class EngineFailed(ReprieveError, RuntimeError):
    """The thread that decodes died of a bug, which is the cause. Every request has ended, new ones are refused."""

    def __str__(self) -> str:
        return f"the engine's thread died of {self.__cause__!r}; make a new engine"


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


class StepAborted(StepFailed):
    """A step that failed and was handed back; `seqs` are the sequences of its rows, the cause is what failed.

    The rows have not ended yet: see `reprieve.launch.end_rows`.
    """

    def __init__(self, seqs: tuple[int, ...]) -> None:
        super().__init__(seqs)
        self.seqs = seqs

    def __str__(self) -> str:
        return f"a step failed, with the sequences {list(self.seqs)}"


class RequestFailed(ReprieveError):
    """A request that somebody waited for has ended with a failure.

    `code` is its finish reason, `retryable` whether trying again makes sense, `text` what was given out until then.
    """

    def __init__(self, request_id: str, code: str, retryable: bool, text: str) -> None:
        super().__init__(request_id, code, retryable, text)
        self.request_id = request_id
        self.code = code
        self.retryable = retryable
        self.text = text

    def __str__(self) -> str:
        again = "trying again makes sense" if self.retryable else "trying again makes no sense"
        if self.code == "capacity":
            again += ", but where the KV pool is larger or less is asked for"
        return f"request {self.request_id!r} failed with {self.code}; {again}"


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


class InexactProduct(ReprieveError, RuntimeError):
    """No tile height gives a row the same bits in every place: decoding could not be exact on this machine."""

    def __init__(self, inputs: int, outputs: int, heights: tuple[int, ...]) -> None:
        super().__init__(inputs, outputs, heights)
        self.inputs = inputs
        self.outputs = outputs
        self.heights = heights

    def __str__(self) -> str:
        return (
            f"the matrix product of {self.inputs} inputs by {self.outputs} outputs gives a row other bits in other "
            f"places of its tile, for every tile height tried ({', '.join(map(str, self.heights))})"
        )


class UnsupportedTokenizer(ModelFileError):
    """The file's vocabulary says it is split in a way that is not known here; guessing would change tokens."""
