"""Chat completions at the gateway: what the policy is shown, what the agent is answered, what is trained."""

from collections.abc import Callable
from typing import Any

import pytest
from gateway_fixtures import ADD, END, TOOLS, Stage, calling, rows_of, trained, user

Make = Callable[..., Stage]


async def test_chat_with_tools_is_one_row_that_is_tokenized_once(stage: Make) -> None:
    play = stage([f"Hm. {ADD}\n{ADD}", "It is 3."])
    await play.serve()
    episode = play.open()
    chat = [{"role": "system", "content": "Be brief."}, user("sum")]
    first = await play.chat(episode, chat, tools=TOOLS)
    assert first["content"] == "Hm."
    assert [call["function"] for call in first["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    ] * 2
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in first["tool_calls"]]
    second = await play.chat(episode, [*chat, first, *results], tools=TOOLS)
    assert second == {"role": "assistant", "content": "It is 3."}
    before, after = play.generator.asked
    assert after == (
        f"{before}Hm. {ADD}\n{ADD}<|end|>\n<|start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n3\n"
        "</tool_response><|end|>\n<|start|>assistant\n"
    )
    added = after.removeprefix(f"{before}Hm. {ADD}\n{ADD}{END}")
    assert play.texts(episode) == [f"{before}[Hm. {ADD}\n{ADD}{END}]{added}[It is 3.{END}]"]
    assert [tokens for tokens, _ in trained(episode)] == [list(one.tokens) for one in play.generator.sampled]


async def test_branches_are_where_the_agent_left_its_chat(stage: Make) -> None:
    play = stage(["one", "two", "three", "title", "summary", "four"])
    await play.serve()
    episode = play.open()
    chat = [user("a")]
    chat += [await play.chat(episode, chat, tools=TOOLS), user("b")]
    await play.chat(episode, [*chat], tools=TOOLS)
    await play.chat(episode, [*chat[:2], user("c")], tools=TOOLS)  # it takes back what it said
    await play.chat(episode, [*chat[:2], user("c")])  # without the tools it is another chat
    compacted = [user("sum up"), await play.chat(episode, [user("sum up")], tools=TOOLS), user("go on")]
    await play.chat(episode, compacted, tools=TOOLS)
    assert [[node.begun for node in root.children] for root in episode.tree.roots] == [[2, 3], [], [6]]
    head = play.generator.asked[0].removesuffix(f"a{END}\n<|start|>assistant\n")
    assert [text.removeprefix(head) for text in play.texts(episode)] == [
        f"a{END}\n<|start|>assistant\n[one{END}]\n<|start|>user\nb{END}\n<|start|>assistant\n[two{END}]",
        f"a{END}\n<|start|>assistant\none{END}\n<|start|>user\nc{END}\n<|start|>assistant\n[three{END}]",
        f"<|start|>user\na{END}\n<|start|>assistant\none{END}\n<|start|>user\nc{END}\n<|start|>assistant\n[title{END}]",
        f"sum up{END}\n<|start|>assistant\n[summary{END}]\n<|start|>user\ngo on{END}\n<|start|>assistant\n[four{END}]",
    ]
    assert [tokens for tokens, _ in trained(episode)] == [list(one.tokens) for one in play.generator.sampled]


async def test_an_answer_is_known_again_however_the_client_writes_it(stage: Make) -> None:
    play = stage([calling("add", a=1.0, b=[{"c": "é"}, 2]) + "\n", "done"])
    await play.serve()
    episode = play.open()
    said = await play.chat(episode, [user("a")], tools=TOOLS)
    arguments = '{"b":[{"c":"\\u00e9"},2],"a":1}'
    rewritten = [{"id": "9", "type": "function", "function": {"name": "add", "arguments": arguments}}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": " "}], "tool_calls": rewritten}
    result = {"role": "tool", "tool_call_id": "9", "content": "3"}
    assert said["content"] is None
    await play.chat(episode, [user("a"), answer, result], tools=TOOLS)
    (row,) = play.texts(episode)
    assert row.count("[") - row.count("[{") == 2


async def test_history_that_the_policy_did_not_write_is_context(stage: Make) -> None:
    play = stage(["yes"])
    await play.serve()
    episode = play.open()
    await play.chat(episode, [user("a"), {"role": "assistant", "content": "I said"}, user("b")])
    (row,) = play.texts(episode)
    assert f"I said{END}" in row
    assert row.endswith(f"<|start|>assistant\n[yes{END}]")


async def test_cut_answer_goes_on_behind_the_token_that_it_lacks(stage: Make) -> None:
    play = stage(["<think>\nhm\n</think>\n\nI was…", "yes"])
    await play.serve()
    episode = play.open()
    response = await play.post(
        episode, "/v1/chat/completions", {"messages": [user("a")], "max_tokens": 7, "temperature": 0.1}
    )
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": "I was", "reasoning_content": "hm"}
    await play.chat(episode, [user("a"), {"role": "assistant", "content": "I was"}, user("b")])
    assert play.texts(episode)[0].endswith(
        f"I was]{END}\n<|start|>user\nb{END}\n<|start|>assistant\n[yes{END}]"
    )
    # The trainer computes with one temperature, whatever the agent asks for.
    assert [(one.max_new_tokens, one.temperature) for one in play.generator.settings] == [
        (7, 1.0),
        (400, 1.0),
    ]


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "leave images",
        ),
        ({"messages": [user("a")], "n": 2}, "expected no n, got 2"),
        ({"messages": [user("a")], "stop": ["x"]}, "expected no stop"),
        ({"messages": [user("a")], "tool_choice": "required", "tools": TOOLS}, "never forced"),
        (
            {"messages": [user("a"), {"role": "assistant", "content": "So"}]},
            "ends with a message to answer",
        ),
        ({"messages": []}, "got none"),
        ({"messages": [{"role": "system", "content": "a"}]}, "got system alone"),
        ({"messages": [{"role": "owl", "content": "a"}]}, "got 'owl'"),
        ({"messages": [user("a")], "tools": [{"type": "web_search"}]}, "tools of type function"),
        ({"messages": [user("word " * 9000)]}, "prompt is too long: 4"),
        ({"messages": [user("word " * 90000)]}, "prompt is too long: its text"),
    ],
)
async def test_what_cannot_be_answered_is_refused(stage: Make, body: Any, wrong: str) -> None:
    play = stage(["never"])
    await play.serve()
    episode = play.open()
    response = await play.post(episode, "/v1/chat/completions", body)
    assert response.status_code == 400
    assert wrong in response.json()["error"]["message"]
    assert (episode.calls, play.generator.asked) == (0, [])


async def test_a_key_is_its_episode_and_ends_with_it(stage: Make) -> None:
    play = stage(["one", "two", "three"])
    await play.serve()
    first, second = play.open(), play.open()
    chat = [user("a"), await play.chat(first, [user("a")]), user("b")]
    await play.chat(second, chat)  # whose answer is the other episode's: context, and no part of its rows
    assert (len(first.tree.roots), len(second.tree.roots), len(rows_of(second))) == (1, 1, 1)
    assert [tokens for tokens, _ in trained(second)] == [list(play.generator.sampled[1].tokens)]
    await play.gateway.close(first)
    for headers in ({"authorization": f"Bearer {first.key}"}, {"authorization": "Bearer x"}, {}):
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/mcp"):
            response = await play.http.post(path, json={"messages": [user("a")]}, headers=headers)
            assert response.status_code == 401
    assert (await play.http.get("/v1/models")).status_code == 401
    models = await play.http.get("/v1/models", headers={"x-api-key": second.key})
    assert [model["id"] for model in models.json()["data"]] == ["policy"]
    assert len(trained(first)) == 1


async def test_limit_of_answers_ends_the_episode(stage: Make) -> None:
    play = stage(["one", "two"])
    await play.serve()
    episode = play.open(max_calls=1)
    await play.chat(episode, [user("a")])
    assert not episode.over.is_set()
    response = await play.post(episode, "/v1/chat/completions", {"messages": [user("b")]})
    assert (response.status_code, episode.over.is_set(), len(trained(episode))) == (403, True, 1)


async def test_side_calls_are_left_out_by_a_rule(stage: Make) -> None:
    play = stage(["one", "two"])
    await play.serve()
    episode = play.open(is_excluded=lambda request: not request.functions)
    await play.chat(episode, [user("title")])
    await play.chat(episode, [user("a")], tools=TOOLS)
    assert [tokens for tokens, _ in trained(episode)] == [list(play.generator.sampled[1].tokens)]
