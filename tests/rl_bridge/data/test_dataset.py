"""Examples in an order that can be gone on with: from a file, from a list, from a checkpoint."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rl_bridge.config import DataConfig
from rl_bridge.data.examples import Dataset, Example, ExampleList, JsonLines, open_source, require_same
from rl_bridge.data.sampling import Passes
from rl_bridge.errors import ConfigError


@pytest.fixture(autouse=True)
def _importable_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    def generated() -> Iterator[Example]:
        for number in range(3):
            yield Example(id=f"made-{number}", prompt=({"role": "user", "content": "hm"},), target=number)

    module = ModuleType("example_lists")
    listed = [{"prompt": f"What is {number} + {number}?", "target": 2 * number} for number in range(5)]
    vars(module).update(LISTED=listed, NUMBER=5, generated=generated, nothing=list)
    monkeypatch.setitem(sys.modules, "example_lists", module)


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def numbers(count: int) -> ExampleList:
    return ExampleList(
        [{"prompt": f"Say {number}", "target": number} for number in range(count)], name="numbers"
    )


def test_lines_of_a_file_are_examples(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "größer als 1?"}]
    path = written(
        tmp_path / "examples.jsonl",
        {"prompt": "2 + 2?", "target": "4", "level": "easy"},
        "",
        {"prompt": chat, "id": "seven"},
        {"prompt": "the last", "target": {"any": ["thing"]}},
    )
    source = open_source(str(path))
    assert [source[place] for place in (2, 0, 1)] == [
        Example(id="2", prompt=({"role": "user", "content": "the last"},), target={"any": ["thing"]}),
        Example(id="0", prompt=({"role": "user", "content": "2 + 2?"},), target="4"),
        Example(id="seven", prompt=tuple(chat), target=None),  # type: ignore[arg-type]
    ]
    assert len(source) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a JSON object, got invalid JSON: .*line 2\)"),
        ("[1]", r"an object with a prompt, got list .*line 2\)"),
        ('{"prompt": [{"role": "user"}]}', r"the prompt to be a text or messages"),
        ('{"prompt": []}', r"the prompt to be a text or messages"),
        # JSON may have half a character, of which no tokenizer makes anything.
        (r'{"prompt": [{"role": "user", "content": "\udc00"}]}', r"got '\\udc00' after .*line 2\)"),
    ],
)
def test_invalid_line_is_reported_before_the_run_begins(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JsonLines(written(tmp_path / "wrong.jsonl", {"prompt": "fine"}, line))


def test_an_iterable_is_found_by_its_dotted_path() -> None:
    assert [open_source("example_lists.LISTED")[place].target for place in range(5)] == [0, 2, 4, 6, 8]
    assert [open_source("example_lists.generated")[place].id for place in (0, 2)] == ["made-0", "made-2"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.jsonl", "cannot read it: No such file"),
        ("example_lists.absent", "a file of JSON lines or the dotted path of an iterable"),
        ("absent", "it names no module"),
        ("example_lists.NUMBER", "to be or to return an iterable, got int"),
        ("example_lists.nothing", "at least one example in 'example_lists.nothing', got none"),
    ],
)
def test_source_without_examples_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(name)


@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_go_through_the_examples_again_and_again(shuffle: bool) -> None:
    dataset, passes = Dataset(numbers(50), seed=3, shuffle=shuffle), Passes(50, seed=3, shuffle=shuffle)
    assert [dataset.sample().target for _ in range(100)] == [passes[number] for number in range(100)]
    assert dataset.get_example(7).target == 7


@pytest.mark.heavy
@pytest.mark.timeout(300)
async def test_each_place_has_the_same_example_after_a_restart(tmp_path: Path) -> None:
    from rl_bridge.data.actor import DatasetActor
    from rl_bridge.services.fleet import Fleet
    from rl_bridge.services.restarts import RestartPolicy

    path = written(
        tmp_path / "examples.jsonl", *({"prompt": f"Say {number}", "target": number} for number in range(100))
    )
    alone = Dataset(open_source(str(path)), seed=5)
    expected = [alone.sample() for _ in range(20)]
    async with Fleet(tmp_path / "logs"), asyncio.timeout(120):
        service = DatasetActor.options(name="dataset", restarts=RestartPolicy(backoff_s=0.0))
        dataloader = await service.as_service(DataConfig(source=str(path)), 5)
        assert [await dataloader.sample.route() for _ in range(20)] == expected
        os.kill(dataloader.replicas[0].pids[0], signal.SIGKILL)
        places = range(20)
        again = await asyncio.gather(*(dataloader.get_example.route(place) for place in places))
        assert again == [alone.get_example(place) for place in places]
        assert await dataloader.identity.route() == alone.identity()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Dataset(numbers(11), seed=1), "with digest="),
        (Dataset(numbers(10), seed=2), "with seed=1, got 2"),
        (Dataset(numbers(10), seed=1, shuffle=False), "with shuffle=True, got False"),
    ],
)
def test_a_dataset_of_another_order_does_not_go_on(other: Dataset, words: str) -> None:
    known = json.loads(json.dumps(Dataset(numbers(10), seed=1).identity()))  # as a checkpoint has it
    require_same(known, Dataset(numbers(10), seed=1).identity())
    require_same({"digest": known["digest"], "seed": 1, "shuffle": True}, known)  # an older one
    with pytest.raises(ConfigError, match=words):
        require_same(known, other.identity())
