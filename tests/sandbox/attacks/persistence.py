"""Staying: in files, in threads, in what other sessions see."""

# ruff: noqa: E501 - what attacks do is easier to read in one line

from .model import EVERYWHERE, STRONG, Stage, attacks_held_at

LOOK = """
found = []
here = os.getcwd()
for folder in (here, os.path.join(here, ".tmp"), "/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~")):
    for name in attempt(os.listdir, folder) or ():
        if name not in (".tmp",) and (folder.startswith(here) or "planted" in name):
            found.append(os.path.join(folder, name))
if found:
    breach("files of another life", found)
if "planted" in globals() or "PLANTED" in os.environ or "planted" in sys.modules or any("planted" in p for p in sys.path):
    breach("state of another life")
"""

PLANT = """
import tempfile
planted = 1
os.environ["PLANTED"] = "1"
sys.path.insert(0, os.getcwd() + "/planted")
sys.modules["planted"] = sys
for folder in (".", ".tmp", "/tmp", "/var/tmp", "/dev/shm", "/run", os.path.expanduser("~"), tempfile.gettempdir(),
               *sys.path, os.path.dirname(os.__file__)):
    for name in ("planted.py", "sitecustomize.py", "usercustomize.py", "planted.pth", "json.py", ".pythonrc.py", "conftest.py"):
        def plant():
            with open(os.path.join(folder, name), "w") as file:
                file.write("planted = 1\\nimport os; os.environ['PLANTED'] = '1'\\n")
        attempt(plant)
"""


async def other_sessions(stage: Stage) -> None:
    """Another session, opened afterwards, sees none of it."""
    await stage.run(PLANT)
    other = await stage.open_session()
    await stage.run(LOOK, session=other)


async def after_restart(stage: Stage) -> None:
    """The same session, begun anew, sees none of it."""
    await stage.run(PLANT)
    await stage.session.restart()
    await stage.run(LOOK)


async def after_death(stage: Stage) -> None:
    """The life after a crash sees none of it, and says that state was lost."""
    await stage.run(PLANT)
    died = await stage.run("os.kill(os.getpid(), 9)")
    if not died.state_lost:
        stage.breaches.append("a crash that nobody is told of")
    await stage.run(LOOK)


async def neighbours_files(stage: Stage) -> None:
    """Two sessions at the same time: one looks for the other's folder, by every path that it can think of."""
    other = await stage.open_session()
    await other.put_file("secret.txt", b"the neighbour's")
    theirs = (await other.execute("import os; os.getcwd()")).result or "''"
    await stage.run(f"""
        import ast
        theirs = ast.literal_eval({theirs!r})
        base = os.path.dirname(os.getcwd())
        for folder in {{theirs, base, *(os.path.join(base, str(n)) for n in range(300))}}:
            if os.path.realpath(folder) != os.path.realpath(os.getcwd()):
                must_fail(folder, os.listdir, folder)
                must_fail(folder, lambda: open(folder + "/secret.txt").read())
                must_fail(folder, lambda: open(folder + "/planted", "w"))
                must_fail(folder, os.rename, folder, "mine")
                must_fail(folder, os.chmod, folder, 0o777)
        attempt(os.chmod, ".", 0o777)
    """)
    await stage.run("must_fail('the file', lambda: open('secret.txt').read())")
    if await other.get_file("secret.txt") != b"the neighbour's":
        stage.breaches.append("a neighbour's file was changed")
    if {info.path for info in await other.list_files()} != {"secret.txt"}:
        stage.breaches.append("a neighbour's workspace has other files")


async def same_random_numbers(stage: Stage) -> None:
    """Interpreters that were forked from the same one do not draw the same numbers."""
    code = """
        import random, uuid, secrets
        print(random.random(), uuid.uuid4(), secrets.token_hex(), hash("x"))
        if "numpy" in sys.modules:
            print(sys.modules["numpy"].random.rand())
        random.random()
    """
    drawn = [await stage.run(code), await stage.run(code, session=await stage.open_session())]
    if drawn[0].result == drawn[1].result:
        stage.breaches.append("two sessions draw the same numbers")


async def at_exit(stage: Stage) -> None:
    """What is registered for the end does not hold up the end."""
    await stage.run("""
        import atexit, weakref
        class Late:
            def __del__(self): time.sleep(60)
        late = Late()
        atexit.register(time.sleep, 60)
        threading._register_atexit(time.sleep, 60)
        threading.Thread(target=time.sleep, args=(60,)).start()
        sys.exit(0)
    """)
    await stage.session.restart()


attack = attacks_held_at(STRONG)

ATTACKS = (
    attack("other-sessions", "nothing is seen by a session that comes later")(other_sessions),
    attack("restart", "nothing is seen after a restart")(after_restart),
    attack("after-death", "nothing is seen after a crash", ends="ok killed")(after_death),
    attack("neighbours-files", "sessions do not see each other's files")(neighbours_files),
    attack("same-randomness", "each session draws numbers of its own", holds=EVERYWHERE)(same_random_numbers),
    attack(
        "at-exit",
        "nothing that was registered for the end delays it",
        ends="ok",
        survives=None,
        holds=EVERYWHERE,
    )(at_exit),
    attack("libraries-patched", "what is changed in a shared library's pages is changed for nobody else")("""
        import mmap
        for module in (os, json, socket, ctypes):
            module.planted = 1
        path = json.__file__
        must_fail("writing", lambda: open(path, "r+"))
        file = os.open(path, os.O_RDONLY)
        must_fail("a shared mapping", lambda: mmap.mmap(file, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))
        must_fail("a byte-compiled file", lambda: open(json.__cached__, "r+b"))
        private = mmap.mmap(file, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        private[0:1] = b"X"
        """),
)
