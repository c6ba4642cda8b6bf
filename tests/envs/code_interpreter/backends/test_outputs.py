"""Output of a service's executions within the limits, and their exit statuses."""

from envs.code_interpreter_env.server.backends.outputs import (
    OutputCollector,
    make_failed_execution,
    parse_traceback,
)
from openenv_core.sandbox import CodeError, Execution, Limits

LIMITS = Limits(output_bytes=10, output_hard_bytes=1024, outputs_bytes=1024, files=8)


def fill(collector: OutputCollector) -> Execution:
    return collector.fill(Execution(status="ok"))


def test_streams_are_cut_at_their_limit_each() -> None:
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
    assert collector.bytes_written == 15 + 2 + 990


def test_bundles_come_whole_or_not_at_all() -> None:
    collector = OutputCollector(LIMITS)
    bundle = {"text/plain": ["a\n", "b"], "application/json": ["a"], "text/x": None}
    collector.show("execute_result", bundle)
    collector.show("display_data", {"image/png": "x" * 2000})
    collector.show("display_data", {"text/plain": "small"})
    seen = fill(collector)
    assert [dict(each.data) for each in seen.outputs] == [
        {"text/plain": "a\nb", "application/json": '["a"]'},
        {"text/plain": "small"},
    ]
    assert (seen.result, seen.cut.outputs) == ("a\nb", True)
    for _ in range(20):
        collector.show("display_data", {})
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
