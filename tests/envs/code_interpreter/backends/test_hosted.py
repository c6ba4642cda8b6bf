"""Parts that hosted interpreters share: output limits, files moved by code, exit statuses."""

import random
from typing import Any

import pytest

from envs.code_interpreter_env.server.backends.hosted import (
    MAX_REPLY_BYTES,
    FileListing,
    InsideCall,
    NoAnswerError,
    check_path,
)
from envs.code_interpreter_env.server.backends.outputs import (
    OutputCollector,
    make_failed_execution,
    parse_traceback,
)
from openenv_core.sandbox import CodeError, Execution, FileRefusedError, Limits

LIMITS = Limits(output_bytes=10, output_hard_bytes=1024, outputs_bytes=1024, files=8)


def fill(collector: OutputCollector) -> Execution:
    return collector.fill(Execution(status="ok"))


async def test_streams_are_cut_at_their_limit_each() -> None:
    collector = OutputCollector(LIMITS)
    for _ in range(3):
        collector.write("stdout", "héé")
    collector.write("stderr", "\ud800x")
    seen = fill(collector)
    assert (seen.stdout, seen.stderr) == ("hééhéé", "?x")
    assert (seen.cut.stdout, seen.cut.stderr) == (True, False)
    whole = OutputCollector(LIMITS)
    whole.write("stdout", "123456789é")
    assert fill(whole).stdout == "123456789"  # a character is not cut in two
    assert fill(whole).cut.stdout
    collector.write("stderr", "x" * 990)
    assert not collector.flood.done()
    collector.write("stdout", "x" * 100)
    assert collector.flood.done()


async def test_bundles_come_whole_or_not_at_all() -> None:
    collector = OutputCollector(LIMITS)
    bundle = {"text/plain": ["a\n", "b"], "application/json": ["a"], "text/x": None}
    collector.show("execute_result", bundle, {})
    collector.show("display_data", {"image/png": "x" * 2000}, {})
    collector.show("display_data", {"text/plain": "small"}, {"width": 7})
    seen = fill(collector)
    assert [dict(each.data) for each in seen.outputs] == [
        {"text/plain": "a\nb", "application/json": '["a"]'},
        {"text/plain": "small"},
    ]
    assert (seen.result, seen.cut.outputs) == ("a\nb", True)
    for _ in range(20):
        collector.show("display_data", {}, {})
    assert len(fill(collector).outputs) == LIMITS.files


def test_exception_and_exit_status() -> None:
    for name, value, status, exit_code in (
        ("ValueError", "", "error", 1),
        ("MemoryError", "", "memory", 1),
        ("SystemExit", "", "ok", 0),
        ("SystemExit", "-1", "error", 255),
        ("SystemExit", "512", "error", 1),
        ("SystemExit", "words", "error", 1),
    ):
        verdict = make_failed_execution(CodeError(ename=name, evalue=value))
        assert (verdict.status, verdict.exit_code) == (status, exit_code)
        assert (verdict.error is None) == (status == "ok")
    text = "Traceback (most recent call last):\n  x\n\x1b[0;31ma.b.Own\x1b[0m: two\nlines\n  indented"
    error = parse_traceback(text)
    assert (error.ename, error.evalue) == ("a.b.Own", "two\nlines\n  indented")


def test_paths_are_relative_and_stay() -> None:
    assert check_path("a/./b//c.txt") == "a/b/c.txt"
    assert check_path("ä ö/文") == "ä ö/文"
    for path in ("", "/", "/a", "..", "a/../b", "a\0", "a\nb", "a\\b", ".", "x" * 1025):
        with pytest.raises(FileRefusedError):
            check_path(path)


def test_call_results_are_read_between_markers(tmp_path: Any) -> None:
    call = InsideCall("files", root=str(tmp_path), known={}, most_files=2, most=10)
    for name in ("b", "a", "c"):
        (tmp_path / name).write_bytes(b"x")
    names: dict[str, object] = {"before": 1}
    said = eval(call.expression, names)  # as an interpreter elsewhere does
    assert set(names) == {"before", "__builtins__"}
    read = call.read(f"printed before{said}and after")
    assert ([row[0] for row in read["files"]], read["more"]) == (["a", "b"], True)
    for lie in ("", said[:-1], said + said, said.replace(said[40:44], "\0\0\0\0"), "x".join([said[:34]] * 3)):
        with pytest.raises(NoAnswerError):
            call.read(lie)
    assert call.read(repr(said)) == read
    with pytest.raises(NoAnswerError):
        call.read(said + " " * MAX_REPLY_BYTES)
    with pytest.raises(NoAnswerError):  # another's marker
        InsideCall("files").read(said)
    failing = InsideCall("get", root="/nowhere", path="x", offset=0, piece=1, most=1)
    assert "no plain file" in failing.read(eval(failing.expression, {}))["refused"]


def test_invalid_listings_are_refused() -> None:
    listing = FileListing(LIMITS)

    def read(*rows: list[Any]) -> list[str]:
        return [file.path for file in listing.read({"files": rows})]

    assert read(["b", 1, 2, "d"], ["a/../x", 1, 1, ""], ["a", 1, 2, "d"]) == ["b", "a"]
    assert [each.path for each in listing.files()] == ["a", "b"]
    assert listing.arguments()["known"] == {"a": [1, 2], "b": [1, 2]}
    assert read(["a", 1, 2, ""], ["b", 1, 3, "e"]) == ["b"]
    assert read(["a", 1, 9, "d"], ["b", 1, 3, ""]) == []  # the same content at another time
    many = [[f"f{index}", 1, 1, "d"] for index in range(50)]
    random.Random(7).shuffle(many)
    assert len(read(*many)) == LIMITS.files
    for files in (7, [7], [["a", "x", 1, ""]], [[7, 1, 1, ""]]):
        with pytest.raises(FileRefusedError):
            listing.read({"files": files})
    with pytest.raises(FileRefusedError):
        listing.read({})
