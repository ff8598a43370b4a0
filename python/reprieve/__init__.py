"""Decode large language models through KV-cache exhaustion, with not one bit of anybody's output changed.

    from reprieve import Engine

    with Engine("demo", kv_blocks=40) as engine:
        answers = [engine.submit(question, chat=True, max_new_tokens=64) for question in questions]
        for event in answers[0]:
            ...

The first half of what is here serves the engine. The second half is the layer below it, for a model runner of your own:
the books (`Ledger`), the retry loop, parking, and the protocols and arrays of `reprieve.step`.
"""

from reprieve import errors
from reprieve._native import Ledger, __version__
from reprieve.config import EngineConfig
from reprieve.engine import Engine
from reprieve.handle import Handle
from reprieve.image_store import HostStore
from reprieve.latch import FaultLatch
from reprieve.launch import end_rows, launch_with_preemption, settle
from reprieve.loading import LoadedModel, load
from reprieve.park import Listener, NullListener, Parker
from reprieve.request import Done, Event, Failed, FinishReason, Paused, Request, RequestStats, Resumed, Token
from reprieve.stats import EngineSnapshot, EngineStats, Progress
from reprieve.step import Books, Device, Step, StepBuffers, StepResult, StepShape, Ticket

__all__ = [
    "Books",
    "Device",
    "Done",
    "Engine",
    "EngineConfig",
    "EngineSnapshot",
    "EngineStats",
    "Event",
    "Failed",
    "FaultLatch",
    "FinishReason",
    "Handle",
    "HostStore",
    "Ledger",
    "Listener",
    "LoadedModel",
    "NullListener",
    "Parker",
    "Paused",
    "Progress",
    "Request",
    "RequestStats",
    "Resumed",
    "Step",
    "StepBuffers",
    "StepResult",
    "StepShape",
    "Ticket",
    "Token",
    "__version__",
    "end_rows",
    "errors",
    "launch_with_preemption",
    "load",
    "settle",
]
