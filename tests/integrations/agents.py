"""Models that follow a script, and records of what agents did."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel

Turn = ModelResponse | Callable[[list[ModelMessage]], ModelResponse]


def says(text: str) -> ModelResponse:
    return ModelResponse(parts=[TextPart(text)])


def calls(*tools: tuple[str, dict[str, Any]]) -> ModelResponse:
    return ModelResponse(parts=[ToolCallPart(name, arguments) for name, arguments in tools])


class Script:
    """A model that answers the n-th request of a conversation with the n-th turn.

    `asked` counts the requests by turn, over all processes of a test.
    """

    def __init__(self, *turns: Turn) -> None:
        self.turns: Sequence[Turn] = turns
        self.asked: Counter[int] = Counter()
        self.model = FunctionModel(self.answer, stream_function=self.stream)

    async def answer(self, messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        n = sum(isinstance(message, ModelResponse) for message in messages)
        self.asked[n] += 1
        turn = self.turns[n]
        return turn if isinstance(turn, ModelResponse) else turn(messages)

    async def stream(
        self, messages: list[ModelMessage], info: AgentInfo
    ) -> AsyncIterator[str | DeltaToolCalls]:
        for n, part in enumerate((await self.answer(messages, info)).parts):
            if isinstance(part, TextPart):
                for word in part.content.split(" "):
                    yield f"{word} "
            elif isinstance(part, ToolCallPart):
                yield {n: DeltaToolCall(part.tool_name, part.args_as_json_str())}


def returned(messages: list[ModelMessage]) -> list[Any]:
    """Return what the tools answered in the last request, in order."""
    last = messages[-1]
    assert isinstance(last, ModelRequest)
    return [part.content for part in last.parts if isinstance(part, ToolReturnPart)]
