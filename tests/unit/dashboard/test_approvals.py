"""The page of open approvals, and the forms that answer them."""

from perdure import Runtime, Step, workflow
from perdure.insights import Insights
from perdure.stores import MemoryStore
from perdure.urls import encode_id
from tests.unit.dashboard.visitor import Visitor, dashboard, text_of

HOSTILE = '"/><script>alert(1)</script>'


@workflow("freight")
async def freight(step: Step, tons: int) -> str:
    answer = await step.approval(
        "ship", f"Ship {tons} t? {HOSTILE}", to="ops", options=("road", "rail"), data={"tons": tons}
    )
    return f"{answer.choice} {answer.by} {answer.note}"


@workflow("signs")
async def signs(step: Step) -> object:
    return await step.callback("signed", timeout="1d")


async def asking(store: MemoryStore, run_id: str = "freight-1") -> Runtime:
    runtime = Runtime(store, workflows=[freight, signs])
    await runtime.trigger(freight, 40, run_id=run_id)
    return runtime


async def test_open_approvals_are_listed_and_found() -> None:
    store = MemoryStore()
    await asking(store)
    visitor = Visitor(dashboard(store))
    page = await visitor.get("/approvals")
    assert "Ship 40 t?" in text_of(page)
    assert "/runs/freight-1/do/approve?wait=ship" in page.text
    assert "<script>alert" not in page.text
    assert "No run waits for an approval by sales." in text_of(
        await visitor.get("/approvals?to=sales")
    )


async def test_the_pages_do_not_reveal_the_token() -> None:
    store = MemoryStore()
    runtime = await asking(store)
    (approval,) = (await runtime.approvals()).approvals
    visitor = Visitor(dashboard(store))
    nonce = approval.token.partition(".")[0]
    for path in ("/approvals", "/runs/freight-1", "/runs/freight-1/do/approve?wait=ship"):
        for query in ("", "format=json"):
            page = await visitor.get(f"{path}{'&' if '?' in path else '?'}{query}")
            assert nonce not in page.text
    assert nonce not in (await visitor.get("/runs/freight-1/export")).text


async def test_a_form_approves_with_a_choice() -> None:
    store = MemoryStore()
    runtime = await asking(store, HOSTILE)
    visitor = Visitor(dashboard(store))
    path = f"/runs/{encode_id(HOSTILE)}/do/approve"
    form = await visitor.get(f"{path}?wait=ship")
    assert "<option>rail</option>" in form.text
    assert '"tons"' in form.text or "tons" in text_of(form)
    fields = {"wait": "ship", "choice": "rail", "why": "cheaper"}
    assert (await visitor.post(path, fields)).status_code == 303
    again = await visitor.post(path, fields)
    assert "it was answered by ana" in text_of(again)
    await runtime.sweep()
    assert await runtime.result(HOSTILE) == "rail ana cheaper"
    (act,) = (await Insights(store).run(HOSTILE)).acts
    assert (act.verb, act.via, act.why) == ("approve", "dashboard", "cheaper")


async def test_a_callback_is_answered_on_the_page_of_its_run() -> None:
    store = MemoryStore()
    runtime = await asking(store)
    await runtime.trigger(signs, run_id="s")
    visitor = Visitor(dashboard(store))
    assert "/runs/s/do/answer?wait=signed" in (await visitor.get("/runs/s")).text
    await visitor.post("/runs/s/do/answer", {"wait": "signed", "payload": '{"ok": true}'})
    await runtime.sweep()
    assert await runtime.result("s") == {"ok": True}


async def test_a_person_who_may_only_view_cannot_answer() -> None:
    store = MemoryStore()
    await asking(store)
    visitor = Visitor(dashboard(store, "view"))
    page = await visitor.get("/approvals")
    assert "Ship 40 t?" in text_of(page)
    assert "/do/approve" not in page.text
    assert (await visitor.get("/runs/freight-1/do/approve")).status_code == 403
