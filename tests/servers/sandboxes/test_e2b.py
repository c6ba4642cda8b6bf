"""E2B's released clients, unchanged, on `ropewalk sandboxes`: sync and async, processes and containers."""

import base64
import gzip
import io
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest
from e2b_service import IMAGE, OTHER, Service, eventually

pytestmark = [pytest.mark.interop, pytest.mark.timeout(120)]

with suppress(ImportError):  # the fixture `client` says so
    import e2b


# ---- sandboxes


def test_sandbox_is_described_listed_and_killed(
    client: Any, service: Service, sandbox: Any, template: str
) -> None:
    info = sandbox.get_info()
    assert (info.sandbox_id, info.template_id, info.metadata) == (sandbox.sandbox_id, template, {"run": "7"})
    assert (info.state, info.cpu_count, info.memory_mb) == (e2b.SandboxState.RUNNING, 1, 1024)
    assert 100 < (info.end_at - info.started_at).total_seconds() < 140
    again = client.connect(sandbox.sandbox_id, **service.options())
    assert again.commands.run("echo $GREETING").stdout == "aye\n"
    assert sandbox.is_running()
    headers = {"X-API-Key": service.options()["api_key"]}
    description = httpx.get(f"{service.url}/sandboxes/{sandbox.sandbox_id}", headers=headers).json()
    assert description["isolation"] in (["namespaces", "lsm"] if template == "base" else ["container"])
    assert sandbox.kill()
    assert not sandbox.is_running()
    assert not client.kill(sandbox.sandbox_id, **service.options())
    with pytest.raises(e2b.SandboxNotFoundException):
        client.connect(sandbox.sandbox_id, **service.options())
    with pytest.raises(e2b.SandboxNotRunningException):
        sandbox.commands.run("true")


def test_sandbox_lists_are_filtered_and_paginated(
    client: Any, service: Service, create: Callable[..., Any]
) -> None:
    run = uuid4().hex
    sandbox_ids = [create(metadata={"run": run, "odd & even": str(n % 2)}).sandbox_id for n in range(5)]

    def listed(metadata: dict[str, str], **options: Any) -> list[list[str]]:
        query = e2b.SandboxQuery(metadata={"run": run, **metadata})
        pages, found = client.list(query=query, **options, **service.options()), []
        while pages.has_next:
            found.append([each.sandbox_id for each in pages.next_items()])
        return found

    assert listed({}) == [sandbox_ids]
    assert listed({}, limit=2) == [sandbox_ids[:2], sandbox_ids[2:4], sandbox_ids[4:]]
    assert listed({}, order="desc", limit=4) == [sandbox_ids[:0:-1], sandbox_ids[:1]]
    assert listed({"odd & even": "1"}) == [sandbox_ids[1::2]]
    assert listed({"odd & even": "2"}) == [[]]
    paused = e2b.SandboxQuery(metadata={"run": run}, state=[e2b.SandboxState.PAUSED])
    assert client.list(query=paused, **service.options()).next_items() == []


def test_timeout_can_be_extended_and_expires(
    client: Any, service: Service, create: Callable[..., Any]
) -> None:
    sandbox = create()
    sandbox.set_timeout(600)
    left = sandbox.get_info().end_at.timestamp() - time.time()
    assert 580 < left < 610
    client.connect(sandbox.sandbox_id, timeout=5, **service.options())  # never shortens it
    assert sandbox.get_info().end_at.timestamp() - time.time() > 500
    paused = create(lifecycle={"on_timeout": "pause"})
    for each in (sandbox, paused):
        each.set_timeout(0)
    eventually(lambda: not sandbox.is_running())
    eventually(lambda: paused.get_info().state == e2b.SandboxState.PAUSED)
    with pytest.raises(e2b.SandboxException, match="86400"):
        create().set_timeout(10**6)


def test_a_pause_keeps_processes_and_memory(client: Any, service: Service, sandbox: Any) -> None:
    sandbox.run_code("kept = 41")
    running = sandbox.commands.run("sleep 600", background=True)
    assert sandbox.pause()
    assert not sandbox.pause()
    assert sandbox.get_info().state == e2b.SandboxState.PAUSED
    assert not sandbox.is_running()
    again = client.connect(sandbox.sandbox_id, **service.options())
    assert again.run_code("kept + 1").text == "42"
    assert [each.pid for each in again.commands.list()] == [running.pid]
    with pytest.raises(e2b.SandboxException, match="filesystem"):
        again.pause(mode="filesystem")


def test_keys_cannot_reach_each_others_sandboxes(
    client: Any, service: Service, create: Callable[..., Any]
) -> None:
    mine, other = create(), service.options(OTHER)
    with pytest.raises(e2b.SandboxNotFoundException):
        client.connect(mine.sandbox_id, **other)
    assert not client.kill(mine.sandbox_id, **other)
    assert mine.sandbox_id not in [each.sandbox_id for each in client.list(**other).next_items()]
    with pytest.raises(e2b.SandboxNotFoundException):
        client.set_timeout(mine.sandbox_id, 1, **other)
    for key in ("no-such-key-anywhere-here", "x"):
        with pytest.raises(e2b.AuthenticationException):
            client.create("base", **service.options(key))
    theirs = create(key=OTHER)
    headers = {"E2b-Sandbox-Id": mine.sandbox_id, "X-Access-Token": theirs._envd_access_token}
    for path in ("/files?path=x", "/health", "/contexts"):
        assert httpx.get(service.url + path, headers=headers).status_code == 401
    answer = httpx.post(service.url + "/process.Process/List", headers=headers, json={})
    assert answer.status_code == 401
    assert mine._envd_access_token not in answer.text
    assert mine.is_running()


def test_unsupported_options_are_refused(client: Any, service: Service) -> None:
    partial_pause = {"on_timeout": {"action": "pause", "mode": "filesystem"}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"volume_mounts": {"/data": "disk"}}, "volume"),
        ({"network": {"deny_out": ["10.0.0.0/8"]}}, "network"),
        ({"timeout": 10**6}, "86400"),
        ({"lifecycle": partial_pause}, "filesystem"),
    ]
    for options, expected in cases:
        with pytest.raises(e2b.SandboxException, match=expected) as refused:
            client.create("base", **{**service.options(), **options})
        assert refused.value.status_code == 400
    with pytest.raises(e2b.SandboxException, match="no-such-template") as refused:
        client.create("no-such-template", **service.options())
    assert refused.value.status_code == 404


# ---- commands


def test_commands_return_output_and_exit_code(sandbox: Any) -> None:
    printed: list[str] = []
    done = sandbox.commands.run(
        "echo $GREETING $MORE; pwd; echo wrong >&2",
        envs={"MORE": "sir"},
        cwd="/usr",
        on_stdout=printed.append,
    )
    assert (done.stdout, done.stderr, done.exit_code) == ("aye sir\n/usr\n", "wrong\n", 0)
    assert "".join(printed) == done.stdout
    with pytest.raises(e2b.CommandExitException) as ended:
        sandbox.commands.run("echo so far; exit 3")
    assert (ended.value.exit_code, ended.value.stdout) == (3, "so far\n")
    assert len(sandbox.commands.run("head -c 5000000 /dev/zero | tr '\\0' 'x'").stdout) == 5_000_000
    assert sandbox.commands.run("printf '\\303'; sleep 0.1; printf '\\251\\n'").stdout == "é\n"
    with pytest.raises(e2b.InvalidArgumentException, match="nowhere"):
        sandbox.commands.run("true", cwd="/nowhere")
    with pytest.raises(e2b.AuthenticationException, match="nobody-here"):
        sandbox.commands.run("true", user="nobody-here")
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("sleep 600", timeout=0.5)
    eventually(lambda: sandbox.commands.list() == [])


def test_commands_run_in_the_background(sandbox: Any) -> None:
    eventually(lambda: sandbox.commands.list() == [])  # an image's own command has ended
    running = sandbox.commands.run("cat; echo over; exit 5", background=True, stdin=True)
    (command,) = sandbox.commands.list()
    code = "cat; echo over; exit 5"
    assert (command.pid, command.cmd, command.args[-1]) == (running.pid, "/bin/bash", code)
    joined = sandbox.commands.connect(running.pid)
    running.send_stdin("one\n")
    sandbox.commands.send_stdin(running.pid, b"two\n")
    sandbox.commands.close_stdin(running.pid)
    for handle in (running, joined):
        with pytest.raises(e2b.CommandExitException) as ended:
            handle.wait()
        assert (ended.value.stdout, ended.value.exit_code) == ("one\ntwo\nover\n", 5)
    for gone in (sandbox.commands.connect, lambda pid: sandbox.commands.send_stdin(pid, "x")):
        with pytest.raises(e2b.NotFoundException):
            gone(running.pid)


def test_commands_can_be_killed_and_outlive_a_disconnect(sandbox: Any) -> None:
    eventually(lambda: sandbox.commands.list() == [])  # an image's own command has ended
    running = sandbox.commands.run("echo begun; exec sleep 600", background=True)
    running.disconnect()
    assert [each.pid for each in sandbox.commands.list()] == [running.pid]
    joined = sandbox.commands.connect(running.pid)
    assert sandbox.commands.kill(running.pid)
    with pytest.raises(e2b.CommandExitException) as ended:
        joined.wait()
    assert (ended.value.exit_code, ended.value.error) == (-1, "signal: killed")
    assert not sandbox.commands.kill(running.pid)


def test_command_with_unread_output_keeps_running(sandbox: Any) -> None:
    running = sandbox.commands.run("head -c 3000000 /dev/zero; touch done", background=True)
    eventually(lambda: sandbox.files.exists("done"))  # its reader has taken nothing yet
    assert len(running.wait().stdout) == 3_000_000
    sandbox.commands.run("yes", background=True).disconnect()
    assert sandbox.commands.run("echo quick").stdout == "quick\n"


@pytest.mark.parametrize("client", ["sync"], indirect=True)
def test_stdin_can_be_streamed(client: Any, create: Callable[..., Any]) -> None:
    sandbox = create()
    running = sandbox.commands.run("wc -c", background=True, stdin=True)
    sandbox.commands.stream_input(running.pid, [b"x" * 1_500_000, "y" * 10])
    sandbox.commands.close_stdin(running.pid)
    assert running.wait().stdout.split() == ["1500010"]


# ---- files


def test_files_are_written_read_listed_moved_and_removed(sandbox: Any) -> None:
    files = sandbox.files
    wrote = files.write("deep/down/a.txt", "früh")
    assert (wrote.name, wrote.type.value) == ("a.txt", "file")
    assert sandbox.commands.run("cat deep/down/a.txt").stdout == "früh"
    assert (files.read("deep/down/a.txt"), files.read(wrote.path)) == ("früh", "früh")
    big = bytes(range(256)) * 10_000
    assert len(files.write_files([{"path": "b", "data": big}, {"path": 'odd "name" é', "data": b""}])) == 2
    assert (bytes(files.read("b", format="bytes")), files.read('odd "name" é')) == (big, "")
    info = files.get_info("b")
    assert (info.size, info.type.value, info.permissions) == (len(big), "file", "rw-r--r--")
    assert info.symlink_target is None
    assert [each.name for each in files.list("deep", depth=2)] == ["down", "a.txt"]
    sandbox.commands.run("ln -s b link")
    assert files.get_info("link").symlink_target == "b"
    assert files.make_dir("made/here")
    assert not files.make_dir("made/here")
    moved = files.rename("b", "made/there/b")
    assert (files.exists("b"), files.exists(moved.path)) == (False, True)
    for path in ("made", "made", "link"):
        files.remove(path)
    assert not files.exists("made")


def test_invalid_file_operations_are_refused(service: Service, sandbox: Any) -> None:
    files = sandbox.files
    files.write("plain", "x")
    for act in (files.read, files.list, files.get_info, lambda path: files.rename(path, "y")):
        with pytest.raises(e2b.FileNotFoundException):
            act("no/such")
    for act in (
        lambda: files.read("."),
        lambda: files.list("plain"),
        lambda: files.write(".", "x"),
        lambda: files.make_dir("plain"),
        lambda: files.read("nul\0"),
    ):
        with pytest.raises(e2b.InvalidArgumentException):
            act()
    sandbox.commands.run("mkfifo pipe || ln -s /dev/zero pipe")
    with pytest.raises(e2b.InvalidArgumentException):
        files.read("pipe")
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": sandbox._envd_access_token}
    answer = httpx.post(f"{service.url}/filesystem.Filesystem/Stat", json={"path": 1}, headers=headers)
    assert answer.status_code == 400
    assert sandbox.commands.run("echo lives").stdout == "lives\n"


def test_file_contents_can_be_streamed(create: Callable[..., Any]) -> None:
    sandbox = create()
    data = bytes(range(256)) * 12_000
    sandbox.files.write("a", io.BytesIO(data))
    sandbox.files.write("b", data, gzip=True)
    for path in ("a", "b"):
        assert bytes(sandbox.files.read(path, format="bytes")) == data
    with pytest.raises(e2b.NotEnoughSpaceException):
        sandbox.files.write("c", io.BytesIO(b"\0" * (80 << 20)))


def test_signed_links_to_files_work_and_expire(service: Service, create: Callable[..., Any]) -> None:
    sandbox = create()
    sandbox.files.write("note", "for whoever has the link")
    url = sandbox.download_url("note", use_signature_expiration=60)
    assert httpx.get(url).text == "for whoever has the link"
    answer = httpx.post(sandbox.upload_url("put"), files={"file": ("ignored", b"there")})
    assert answer.json()[0]["name"] == "put"
    assert sandbox.files.read("put") == "there"
    headers = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
    cut = httpx.post(sandbox.upload_url("cut"), content=gzip.compress(b"there")[:-1], headers=headers)
    assert (cut.status_code, sandbox.files.exists("cut")) == (400, False), cut.text
    expired = sandbox.download_url("note", use_signature_expiration=-5)
    for bad in (url.replace("note", "put"), expired, url[:-30]):
        assert httpx.get(bad).status_code in (401, 502)
    assert httpx.post(url, files={"file": ("note", b"overwritten")}).status_code in (401, 502)


@pytest.mark.parametrize("recursive", [False, True])
def test_folders_are_watched(client: Any, sandbox: Any, recursive: bool) -> None:
    sandbox.files.make_dir("seen/below")
    events: list[Any] = []
    if isinstance(client, type):
        handle = sandbox.files.watch_dir("seen", recursive=recursive)
    else:
        handle = sandbox.files.watch_dir("seen", events.append, recursive=recursive)

    def read_events() -> list[tuple[str, str]]:
        if isinstance(client, type):
            events.extend(handle.get_new_events())
        else:
            sandbox.is_running()  # lets the loop turn
        return [(each.type.value, each.name) for each in events]

    sandbox.files.write("seen/a", "1")
    sandbox.files.write("seen/below/b", "1")
    eventually(lambda: ("create", "a") in read_events())
    sandbox.files.write("seen/a", "22")
    eventually(lambda: ("write", "a") in read_events())
    sandbox.files.rename("seen/a", "seen/c")
    eventually(lambda: {("rename", "a"), ("create", "c")} <= set(read_events()))
    sandbox.files.remove("seen/c")
    eventually(lambda: ("remove", "c") in read_events())
    assert (("create", "below/b") in read_events()) == recursive
    handle.stop()
    with pytest.raises(e2b.FileNotFoundException):
        sandbox.files.watch_dir("nowhere", *([] if isinstance(client, type) else [print]))


# ---- code

PNG = b"\x89PNG of a kind"
SHOWS = f"class Picture:\n    def _repr_png_(self): return {PNG!r}\ndisplay(Picture())"


def test_cells_keep_state_and_show_results(sandbox: Any) -> None:
    streamed: list[str] = []
    done = sandbox.run_code(
        "import os, sys\nprint('out')\nprint('err', file=sys.stderr)\nos.system('echo below')\nx = 20\nx + 1",
        on_stdout=lambda message: streamed.append(message.line),
    )
    assert (done.text, "".join(done.logs.stdout)) == ("21", "out\nbelow\n")
    assert "".join(done.logs.stderr) == "err\n"
    assert ("".join(streamed), done.execution_count, done.error) == ("out\nbelow\n", 1, None)
    failed = sandbox.run_code("y = x\nundefined_name")
    assert (failed.error.name, failed.execution_count) == ("NameError", 2)
    assert "undefined_name" in failed.error.traceback
    assert sandbox.run_code("y").text == "20"
    (picture,) = sandbox.run_code(SHOWS).results
    assert (base64.b64decode(picture.png), picture.is_main_result) == (PNG, False)
    assert sandbox.run_code("import asyncio; await asyncio.sleep(0, 'awaited')").text == "'awaited'"
    both = "os.environ['ONCE'] + os.environ['GREETING']"
    assert sandbox.run_code(both, envs={"ONCE": "1"}).text == "'1aye'"
    assert sandbox.run_code("os.environ.get('ONCE')").results == []
    assert sandbox.run_code("1", envs={"A=B": "x"}).error.name == "ValueError"
    assert sandbox.run_code("sys.stdin.read()").text == "''"
    sandbox.files.write("data.txt", "shared")
    assert sandbox.run_code("open('data.txt').read()").text == "'shared'"


def test_output_arrives_while_code_runs(sandbox: Any) -> None:
    came: list[str] = []
    sandbox.files.write("gate", "")
    code = "import os, time\nprint('begun', flush=True)\nwhile os.path.exists('gate'): time.sleep(0.01)\ndisplay(1)"
    running = sandbox.commands.run("sleep 1; rm gate", background=True)
    done = sandbox.run_code(code, on_stdout=lambda message: came.append(message.line), timeout=60)
    assert (came, [each.text for each in done.results]) == (["begun\n"], ["1"])
    running.wait()


def test_code_contexts_have_separate_state(sandbox: Any) -> None:
    sandbox.files.make_dir("elsewhere")
    one, two = sandbox.create_code_context(), sandbox.create_code_context(cwd="elsewhere")
    sandbox.run_code("x = 1", context=one)
    sandbox.run_code("x = 2", context=two)
    assert [sandbox.run_code("x", context=each).text for each in (one, two)] == ["1", "2"]
    assert sandbox.run_code("import os; os.path.basename(os.getcwd())", context=two).text == "'elsewhere'"
    assert {each.id for each in sandbox.list_code_contexts()} == {one.id, two.id}
    sandbox.restart_code_context(one)
    assert sandbox.run_code("x", context=one).error.name == "NameError"
    sandbox.remove_code_context(two)
    with pytest.raises(e2b.NotFoundException):
        sandbox.run_code("x", context=two)
    with pytest.raises(e2b.SandboxException, match="cobol"):
        sandbox.run_code("x", language="cobol")


def test_timeout_keeps_the_state_and_a_lost_interpreter_is_replaced(sandbox: Any) -> None:
    sandbox.run_code("kept = 42")
    with pytest.raises(e2b.TimeoutException):
        sandbox.run_code("import time; time.sleep(600)", timeout=1)
    assert sandbox.run_code("kept", timeout=60).text == "42"
    done = sandbox.run_code("print('last words', flush=True); import os; os._exit(3)")
    assert (done.error.name, "".join(done.logs.stdout)) == ("InterpreterLost", "last words\n")
    assert sandbox.run_code("kept").error.name == "NameError"
    stubborn = "import time\nwhile True:\n  try: time.sleep(600)\n  except BaseException: pass"
    with pytest.raises(e2b.TimeoutException):
        sandbox.run_code(stubborn, timeout=1)
    assert sandbox.run_code("6 * 7", timeout=60).text == "42"


# ---- copies

sync_only = pytest.mark.parametrize("client", ["sync"], indirect=True)


@sync_only
def test_forks_continue_independently_from_the_forked_state(
    client: Any, service: Service, create: Callable[..., Any]
) -> None:
    sandbox = create(envs={"GREETING": "aye"}, metadata={"run": "7"})
    sandbox.run_code("import random, os; random.seed(7); x = 1; os.makedirs('deep'); os.chdir('deep')")
    context = sandbox.create_code_context()
    sandbox.run_code("y = 5", context=context)
    sandbox.files.write("tool", "#!/bin/sh\necho $GREETING")
    sandbox.commands.run("chmod +x tool; ln -s tool link; mkdir empty; sleep 600", background=True)
    eventually(lambda: sandbox.files.exists("empty"))
    one, two = sandbox.fork(count=2, timeout=100)
    drawn = [each.run_code("random.random()").text for each in (sandbox, one, two)]
    assert len(set(drawn)) == 1
    assert one.run_code("x, os.path.basename(os.getcwd())").text == "(1, 'deep')"
    assert one.run_code("y", context=context).text == "5"
    assert one.commands.run("./link; ls").stdout.split() == ["aye", "deep", "empty", "link", "tool"]
    assert (one.commands.list(), len(sandbox.commands.list())) == ([], 1)
    one.run_code("x = 10; open('mine', 'w').write('1')")
    assert [each.run_code("x, os.listdir()").text for each in (sandbox, two)] == ["(1, [])"] * 2
    info = one.get_info()
    assert (info.metadata, 80 < (info.end_at - info.started_at).total_seconds() < 110) == ({"run": "7"}, True)
    # Each is interrupted, restarted and ended for itself, and with it what runs in it.
    with pytest.raises(e2b.TimeoutException):
        one.run_code("while True: pass", timeout=1)
    assert one.run_code("x", timeout=60).text == "10"
    one.restart_code_context("default")
    assert one.run_code("x").error.name == "NameError"
    assert two.run_code("os._exit(3)").error.name == "InterpreterLost"
    assert two.run_code("6 * 7").text == "42"
    mark = uuid4().int % 10**8 + 10**6
    (deeper,) = two.fork()
    deeper.commands.run(f"exec sleep {mark}", background=True)
    deeper.run_code("z = 3")
    assert sandbox.kill()
    assert deeper.run_code("z").text == "3"
    command = ["sleep", str(mark)]
    (sleep,) = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == command]
    assert deeper.kill()
    eventually(lambda: not sleep.is_running() or sleep.status() == psutil.STATUS_ZOMBIE)
    assert two.run_code("6 * 7").text == "42"
    assert one.kill()
    assert two.kill()


@sync_only
def test_sandboxes_are_created_from_snapshots(
    client: Any, service: Service, create: Callable[..., Any]
) -> None:
    sandbox = create()
    sandbox.run_code("x = 1; open('file', 'w').write('then')")
    snapshot = sandbox.create_snapshot(name="mine")
    sandbox.run_code("x = 2; open('file', 'w').write('now')")
    sandbox.kill()
    copies = [create(snapshot.snapshot_id, metadata={"n": str(n)}) for n in range(2)]
    copies[0].run_code("x = 3")
    assert [each.run_code("x, open('file').read()").text for each in copies] == ["(3, 'then')", "(1, 'then')"]
    assert [each.get_info().metadata for each in copies] == [{"n": "0"}, {"n": "1"}]

    def listed(**query: str) -> list[str]:
        return [each.snapshot_id for each in client.list_snapshots(**query, **service.options()).next_items()]

    assert listed() == listed(sandbox_id=sandbox.sandbox_id) == listed(name="mine") == [snapshot.snapshot_id]
    assert listed(name="another") == []
    for act in (client.connect, lambda name, **options: client.create(name, **options)):
        with pytest.raises(e2b.SandboxException):  # it is no sandbox, and nobody else's template
            act(snapshot.snapshot_id, **service.options(*([] if act == client.connect else [OTHER])))
    assert not client.delete_snapshot(snapshot.snapshot_id, **service.options(OTHER))
    assert client.delete_snapshot(snapshot.snapshot_id, **service.options())
    assert not client.delete_snapshot(snapshot.snapshot_id, **service.options())
    assert copies[1].run_code("x").text == "1"


@sync_only
def test_fork_is_refused_where_the_state_cannot_be_copied(
    client: Any, service: Service, create: Callable[..., Any]
) -> None:
    def refused(status: int, expected: str, act: Callable[[], Any]) -> None:
        with pytest.raises(e2b.SandboxException, match=expected) as error:
            act()
        assert error.value.status_code == status

    sandbox = create()
    refused(400, "filesystem", lambda: sandbox.create_snapshot(mode="filesystem"))
    sandbox.files.write("big", b"x" * (40 << 20))
    refused(507, "No space|may hold", sandbox.fork)
    sandbox.files.remove("big")
    sandbox.files.write("hidden", "x")
    sandbox.commands.run("chmod 0 hidden")
    refused(400, "hidden.*not copied", sandbox.fork)
    sandbox.files.remove("hidden")
    sandbox.pause()
    refused(409, "paused", sandbox.fork)
    sandbox = client.connect(sandbox.sandbox_id, **service.options())
    code = "import os, time; open('begun', 'w')\nwhile not os.path.exists('go'): time.sleep(0.05)"
    runs = threading.Thread(target=sandbox.run_code, args=(code,))
    runs.start()
    eventually(lambda: sandbox.files.exists("begun"))
    refused(409, "runs code", sandbox.fork)
    sandbox.files.write("go", "")
    runs.join()
    (fork,) = sandbox.fork()
    refused(400, "end them first", sandbox.pause)
    assert fork.kill()
    eventually(sandbox.pause)  # its last relative has gone


# ---- extensions, and ports inside


@pytest.mark.docker
def test_servers_inside_are_reached_through_the_api_port(
    service: Service, create: Callable[..., Any], engine: object
) -> None:
    sandbox = create(IMAGE, allow_internet_access=False)
    sandbox.files.write("page.txt", "from inside")
    sandbox.commands.run("python3 -m http.server 8123", background=True)
    url = f"{service.url}/sandboxes/{sandbox.sandbox_id}/ports/8123/page.txt"
    eventually(lambda: httpx.get(url).status_code == 200)
    assert httpx.get(url).text == "from inside"
    for elsewhere in (url.replace("8123", "49983"), url.replace(sandbox.sandbox_id, "0" * 20)):
        assert httpx.get(elsewhere).status_code == 502
    with pytest.raises(e2b.SandboxException, match="no memory") as refused:
        sandbox.fork()
    assert refused.value.status_code == 501
    with pytest.raises(e2b.SandboxException, match="no-such-tag") as refused:
        create("python:no-such-tag")
    assert refused.value.status_code == 404
    with pytest.raises(e2b.CommandExitException):  # and nothing leads out
        sandbox.commands.run("python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 2)'")
