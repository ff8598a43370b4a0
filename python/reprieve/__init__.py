"""Decode large language models through KV-cache exhaustion, with not one bit of anybody's output changed.

    from reprieve import Engine

    with Engine("demo", kv_blocks=40) as engine:
        answers = [engine.submit(question, chat=True, max_new_tokens=64) for question in questions]
        for event in answers[0]:
            ...

Serving code awaits `AsyncEngine` in its place. The first half of what is here serves the engines. The second half is
the layer below them, for a model runner of your own: the books (`Ledger`), the retry loop, parking, the run-ahead lane,
and the protocols and arrays of `reprieve.step`.
"""

from reprieve import errors
from reprieve._native import Ledger, __version__
from reprieve.async_engine import AsyncEngine
from reprieve.config import EngineConfig
from reprieve.engine import Engine
from reprieve.handle import Handle
from reprieve.image_store import HostStore
from reprieve.lane import Lane
from reprieve.latch import FaultLatch
from reprieve.launch import drop, end_rows, launch_with_preemption, settle
from reprieve.loading import LoadedModel, load
from reprieve.park import Listener, NullListener, Park, Parker
from reprieve.request import Done, Event, Failed, FinishReason, Mask, Paused, Request, RequestStats, Resumed, Token
from reprieve.stats import EngineSnapshot, EngineStats, ParkRecord, Progress
from reprieve.step import Books, Device, InFlight, NothingInFlight, Step, StepBuffers, StepResult, StepShape, Ticket
from reprieve.stream import Stream
from reprieve.trace import Trace

__all__ = [
    "AsyncEngine",
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
    "InFlight",
    "Lane",
    "Ledger",
    "Listener",
    "LoadedModel",
    "Mask",
    "NothingInFlight",
    "NullListener",
    "Park",
    "ParkRecord",
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
    "Stream",
    "Ticket",
    "Token",
    "Trace",
    "__version__",
    "drop",
    "end_rows",
    "errors",
    "launch_with_preemption",
    "load",
    "settle",
]
