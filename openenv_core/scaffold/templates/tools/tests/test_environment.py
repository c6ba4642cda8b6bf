"""Results of tools, and a whole episode through the client."""

from pathlib import Path

import pytest

from openenv_core import EpisodeOverError
from openenv_core.tools import CallToolAction, CallToolObservation, ToolErrorType

from ..client import PlaceHolderEnv
from ..models import PlaceHolderObservation
from ..server.environment import MAX_STEPS, PlaceHolderEnvironment

PARENT = Path(__file__).parents[2]


def call(environment: PlaceHolderEnvironment, name: str, **arguments: object) -> CallToolObservation:
    """Call a tool in a step."""
    answer = environment.step(CallToolAction(tool_name=name, arguments=arguments))
    assert isinstance(answer, CallToolObservation)
    return answer


def test_calls_that_cannot_be_made_are_answered_and_use_the_episode_up() -> None:
    """Unknown tools and wrong arguments are errors of the call, not of the session."""
    environment = PlaceHolderEnvironment()
    environment.reset(seed=1)
    unknown, wrong = call(environment, "lok"), call(environment, "look", shelf="up")
    for answer, kind in ((unknown, ToolErrorType.TOOL_NOT_FOUND), (wrong, ToolErrorType.INVALID_ARGS)):
        assert answer.error is not None
        assert answer.error.error_type is kind
    ends = [call(environment, "list_shelves").done for _ in range(MAX_STEPS - 2)]
    assert ends == [False] * (MAX_STEPS - 3) + [True]
    with pytest.raises(EpisodeOverError):
        call(environment, "list_shelves")


def test_looking_at_every_shelf_answers_the_question_through_the_client() -> None:
    """A client that adds up what it sees, on a server in another process."""
    with PlaceHolderEnv.from_process(cwd=str(PARENT)) as env:
        assert [tool.name for tool in env.list_tools()] == ["list_shelves", "look", "submit"]
        for seed in range(10):
            first = env.reset(seed=seed).observation
            assert isinstance(first, PlaceHolderObservation)
            wanted = first.task.split()[2]
            shelves = [env.call_tool("look", shelf=shelf) for shelf in env.call_tool("list_shelves")]
            total = sum(goods.get(wanted, 0) for goods in shelves)
            end = env.step(CallToolAction(tool_name="submit", arguments={"total": total}))
            assert isinstance(end.observation, CallToolObservation)
            assert (end.observation.result, end.reward, end.done) == ("right", 1.0, True)
