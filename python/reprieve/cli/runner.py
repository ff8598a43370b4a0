"""Runs a plan: all requests together, then each alone if that is asked for."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from reprieve.cli.report import Pool, Report
from reprieve.cli.view import LineView, LiveView, printable
from reprieve.config import EngineConfig
from reprieve.engine import Engine
from reprieve.errors import InvalidArgument
from reprieve.hub import hub_name, resolve_model
from reprieve.loading import LoadedModel, load
from reprieve.request import DONE_REASONS
from reprieve.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from reprieve.cli.plan import Plan, Prompt
    from reprieve.device.kv_pool import KvKind
    from reprieve.handle import Handle
    from reprieve.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Setup:
    """What the engine of a run is made of; the engines of the solo runs share all but the room and the parks."""

    model: LoadedModel
    kv: KvKind | Literal["auto"]
    config: EngineConfig


def run(plan: Plan, console: Console) -> int:
    """Do what `plan` asks for, and show it; return the exit status.

    Raises `InvalidArgument` for bad input, with nothing computed; `ModelFileError` for a bad or missing model.
    """
    report = decode(plan, console, (LiveView if console.is_terminal else LineView)(console))
    console.print(report.table())
    console.print(Text(report.sentence()), soft_wrap=True)
    if plan.json_path is not None:
        _write_json(report, plan.json_path)
    return report.status


def decode(plan: Plan, console: Console, view: LineView) -> Report:
    """Answer the requests of `plan`, shown in `view`, and each alone if it asks for that; raises what `run` does."""
    model = _load(plan, console)
    requests = [_with_ids(model, prompt, ignore_eos=plan.ignore_eos) for prompt in plan.prompts]
    config = EngineConfig(**plan.settings)
    if "kv_blocks" not in plan.settings:
        config = replace(config, kv_blocks=ample_blocks(model, config, requests))
    setup = Setup(model, plan.kv, config)
    trace = None if plan.trace_path is None else Trace()
    try:
        report = _run_together(setup, plan.prompts, requests, view, trace)
    finally:
        # A run that was broken off is one to look at.
        if trace is not None and plan.trace_path is not None:
            _write_trace(trace, plan.trace_path)
    if plan.check_alone:
        report = replace(report, same_as_alone=_check_alone(setup, requests, report.requests, console))
    return report


def num_blocks(num_positions: int, block_size: int) -> int:
    """Return the blocks that hold `num_positions`."""
    return -(-num_positions // block_size)


def most_blocks(model: LoadedModel, config: EngineConfig, request: Request) -> int:
    """Return the blocks that a request takes at most, used up to the end of its budget or of the context."""
    context = config.context_length or model.config.context_length
    budget = context if request.max_new_tokens is None else request.max_new_tokens
    # The last token is never fed.
    return num_blocks(min(len(request.prompt) + budget - 1, context), config.block_size)


def ample_blocks(model: LoadedModel, config: EngineConfig, requests: Sequence[Request]) -> int:
    """Return the blocks with which nobody ever has to give way or to wait for blocks."""
    largest = sorted((most_blocks(model, config, request) for request in requests), reverse=True)
    resident = largest[: config.max_slots]
    return sum(resident) + config.head_room * len(resident)


def run_alone(
    setup: Setup, request: Request, advance: Callable[[int], object]
) -> tuple[list[int], FinishReason | None]:
    """Return the tokens of a request, and how it ends, when it has an engine to itself with room for all of it.

    The weights are shared. `advance` is told after each step how many tokens came.
    """
    config = replace(
        setup.config,
        kv_blocks=most_blocks(setup.model, setup.config, request),
        max_slots=1,
        head_room=0,
        host_kv_bytes=0,
        force_park_every=0,
        force_park_by=None,
        depth=1,
    )
    with Engine(setup.model, kv=setup.kv, config=config) as engine:
        handle = engine.submit(request)
        while not handle.is_finished:
            before = len(handle.tokens)
            engine.step()
            advance(len(handle.tokens) - before)
    return handle.tokens, handle.finish_reason


def _load(plan: Plan, console: Console) -> LoadedModel:
    # Outside of the spinner: fetching shows a progress bar of its own.
    path = resolve_model(plan.model)
    with console.status(f"Loading {path.name}"):
        return load(
            path,
            device=plan.device,
            weights=plan.weights,
            threads=plan.threads,
            name=hub_name(plan.model, path),
        )


def _with_ids(model: LoadedModel, prompt: Prompt, *, ignore_eos: bool) -> Request:
    """Return the request of a prompt, as token ids: how many they are says how large the pool has to be."""
    if not isinstance(prompt.content, str):
        return prompt.request(prompt.content, ignore_eos=ignore_eos)
    if model.text is None:
        raise prompt.refused("prompt", "is text, and the model has no tokenizer; give token ids")
    chat = model.text.chat_template is not None if prompt.chat is None else prompt.chat
    try:
        ids = model.text.encode_prompt(prompt.content, chat=chat)
    except InvalidArgument as error:
        raise prompt.refused(error.field, error.problem) from None
    return prompt.request(ids, ignore_eos=ignore_eos)


def _run_together(
    setup: Setup, prompts: Sequence[Prompt], requests: Sequence[Request], view: LineView, trace: Trace | None
) -> Report:
    """Decode all requests in one engine and show it."""
    model, config = setup.model, setup.config
    with Engine(model, kv=setup.kv, config=config, trace=trace) as engine:
        handles = [_submit(engine, prompt, request) for prompt, request in zip(prompts, requests, strict=True)]
        view.line(Text(_describe(engine, requests)))
        seconds = 0.0
        with view:
            while not all(handle.is_finished for handle in handles):
                started = time.perf_counter()
                engine.step()
                seconds += time.perf_counter() - started
                for handle in handles:
                    for event in handle.take_events():
                        view.event(handle, event, engine.stats.steps)
                view.show(engine.snapshot, engine.stats.steps)
        engine.drain()  # so that over-runs are counted
        return Report(
            model=model.name,
            device=model.device,
            threads=model.threads,
            weights=model.weights,
            kv=engine.kv,
            host_kv_bytes=config.host_kv_bytes,
            pool=Pool(config.kv_blocks, config.block_size, sum(_blocks_used(handle, config) for handle in handles)),
            depth=engine.depth,
            steps=engine.stats.steps,
            over_runs=engine.stats.over_runs,
            seconds=seconds,
            requests=handles,
            same_as_alone=[None] * len(handles),
        )


def _submit(engine: Engine, prompt: Prompt, request: Request) -> Handle:
    try:
        return engine.submit(request)
    except InvalidArgument as error:
        raise prompt.refused(error.field, error.problem) from None


def _describe(engine: Engine, requests: Sequence[Request]) -> str:
    """Say what is about to run."""
    model, config = engine.model, engine.config
    most = sum(most_blocks(model, config, request) for request in requests)
    threads = "1 thread" if model.threads == 1 else f"{model.threads} threads"
    pool = f"{config.kv_blocks} blocks of {config.block_size} positions"
    return (
        f"{printable(model.name)} on the {model.device} device, {threads}. Requests: {len(requests)}. They share a KV "
        f"pool of {pool}; with their budgets used up they need {most}."
    )


def _blocks_used(handle: Handle, config: EngineConfig) -> int:
    """Return the blocks of a request at its full length; the last token was never fed."""
    return num_blocks(len(handle.prompt_tokens) + max(len(handle.tokens) - 1, 0), config.block_size)


def _check_alone(
    setup: Setup, requests: Sequence[Request], together: Sequence[Handle], console: Console
) -> list[bool | None]:
    """Return of each request whether it ends in the same way, with the same tokens, when it runs alone."""
    same: list[bool | None] = []
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=sum(len(handle.tokens) for handle in together))
        for number, (request, handle) in enumerate(zip(requests, together, strict=True), start=1):
            what = f"alone: {printable(handle.id)} ({number} of {len(requests)})"
            progress.update(task, description=what)
            if not console.is_terminal:
                console.print(Text(what), soft_wrap=True)
            tokens, reason = run_alone(setup, request, lambda tokens: progress.advance(task, tokens))
            if handle.finish_reason not in DONE_REASONS:
                # It was cut short, which is reported as such; what it gave until then is compared.
                tokens, reason = tokens[: len(handle.tokens)], handle.finish_reason
            same.append((tokens, reason) == (handle.tokens, handle.finish_reason))
    return same


def _write_trace(trace: Trace, name: str) -> None:
    try:
        trace.write(name)
    except OSError as error:
        raise InvalidArgument("--trace", f"cannot write {name}: {error.strerror or error}") from None


def _write_json(report: Report, name: str) -> None:
    text = json.dumps(report.to_json(), indent=2) + "\n"
    if name == "-":
        sys.stdout.write(text)
        return
    try:
        Path(name).write_text(text, "utf-8")
    except OSError as error:
        raise InvalidArgument("--json", f"cannot write {name}: {error.strerror or error}") from None
