"""Decode large language models through KV-cache exhaustion, with not one bit of anybody's output changed.

from reprieve import Engine

with Engine("demo", kv_blocks=40) as engine:
    answers = [engine.submit(question, chat=True, max_new_tokens=64) for question in questions]
    for event in answers[0]:
        ...
"""

from reprieve import errors
from reprieve._native import Ledger, __version__
from reprieve.config import EngineConfig
from reprieve.engine import Engine
from reprieve.handle import Handle
from reprieve.image_store import HostStore
from reprieve.launch import FaultLatch, end_rows, launch_with_preemption, settle
from reprieve.loading import LoadedModel, load
from reprieve.park import NullListener, Parker
from reprieve.request import Done, Event, Failed, FinishReason, Paused, Request, RequestStats, Resumed, Token

__all__ = [
    "Done",
    "Engine",
    "EngineConfig",
    "Event",
    "Failed",
    "FaultLatch",
    "FinishReason",
    "Handle",
    "HostStore",
    "Ledger",
    "LoadedModel",
    "NullListener",
    "Parker",
    "Paused",
    "Request",
    "RequestStats",
    "Resumed",
    "Token",
    "__version__",
    "end_rows",
    "errors",
    "launch_with_preemption",
    "load",
    "settle",
]
