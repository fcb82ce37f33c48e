"""Runs whose every text tries to break out of the page that shows it."""

from typing import Any

from perdure import Runtime, Step
from perdure.operations import Operations
from perdure.runtime.definition import Definition
from perdure.store import Store
from perdure.testing.conformance.hostile import NAMES

ATTACKS = (
    "<script>alert('owned')</script>",
    "\"><img src=x onerror=alert('owned')>",
    "</title></textarea></script><svg onload=alert('owned')>",
    "javascript:alert('owned')",
    "{{ 7 * 7 }}{% raw %}${7*7}",
    "' onmouseover='alert(1)' x='",
    "<link rel=stylesheet href=//example.com/x.css>",
    "&lt;b&gt;<b>bold</b>&amp;amp;",
    "\x1b[31mred\x1b]0;title\x07",
)
TEXTS = (*ATTACKS, *NAMES[:32:3], *NAMES[32::6])


async def fail(text: str) -> None:
    raise RuntimeError(text) from ValueError(text)


async def echo(text: str) -> dict[str, Any]:
    return {text: [text], "__html__": text}


def definition(text: str) -> Definition[Any, Any]:
    """Return a workflow with this name, whose steps, events, tags and errors contain the text."""

    async def body(step: Step, payload: dict[str, str]) -> str:
        step.tag(text=text[:200])
        step.report(progress=0.5, note=text)
        await step("echo", echo, text, key=text[:200])
        if "calls" in payload:
            await step.call(f"call {text}"[:200], text, {"waits": text})
        if "fails" in payload:
            await step("fail", fail, text)
        if "asks" in payload:
            options, data = (text[:100], f"not {text[:100]}"), {text: text}
            ask = f"ask {text}"[:200]
            await step.approval(ask, text, to=text[:200], options=options, data=data)
        await step.wait_for_event(f"wait {text}", text, timeout="1d")
        return text

    return Definition(text, body)


async def fill(store: Store) -> None:
    """Fill the store with a failed, a waiting and a paused run for each text."""
    definitions = [definition(text) for text in TEXTS]
    runtime, operations = Runtime(store, workflows=definitions), Operations(store)
    for text, each in zip(TEXTS, definitions, strict=True):
        short = text[:500]
        await runtime.trigger(each, {"fails": text, text: text}, run_id=text)
        await runtime.trigger(each, {"waits": text}, run_id=f"w {short}")
        await runtime.signal(f"w {short}", f"{text}?", {"text": text})
        await runtime.trigger(each, {"paused": text}, run_id=f"p {short}")
        await operations.pause(f"p {short}", by=short[:100], why=text)
    for text in ATTACKS:
        await runtime.trigger(text, {"calls": text}, run_id=f"c {text}")
        await runtime.trigger(text, {"asks": text}, run_id=f"a {text}")
        await runtime.schedule(text, text, {text: text}, every="1d", tags={"text": text})
        await operations.pause_schedule(text, by=text, why=text)
        await operations.pause_queue(queue_name(text), by=text, why=text)
    await runtime.sweep()


def queue_name(text: str) -> str:
    """Return the name of a queue that contains the text, as far as a name may."""
    return text.replace("/", "∕")
