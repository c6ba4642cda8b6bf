"""Archives that code unpacks in its workspace."""

# ruff: noqa: E501 - what attacks do is easier to read in one line

from .model import STRONG, attacks_held_at

attack = attacks_held_at(STRONG)

ATTACKS = (
    attack(
        "zip-bomb",
        "more than the workspace may hold is stopped",
        ends="ok killed error timeout",
        timeout_s=4.0,
    )("""
        import io, zipfile
        with zipfile.ZipFile("bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for number in range(6):
                archive.writestr(f"f{number}", bytes(7 << 20))
        with zipfile.ZipFile("bomb.zip") as archive:
            for _ in range(6):
                for name in archive.namelist():
                    attempt(archive.extract, name, f"out{_}")
        time.sleep(0.4)
        """),
    attack("tar-traversal", "names that lead out of the workspace lead nowhere")("""
        import io, tarfile
        def add(archive, name, **more):
            info = tarfile.TarInfo(name)
            for key, value in more.items():
                setattr(info, key, value)
            data = b"planted"
            info.size = len(data) if info.type == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(data))
        with tarfile.open("evil.tar", "w") as archive:
            for name in ("../planted", "/tmp/planted", "../../planted", HOST["folder"] + "/open/planted", HOST["writable"]):
                add(archive, name)
            add(archive, "out", type=tarfile.SYMTYPE, linkname=HOST["folder"] + "/open")
            add(archive, "out/planted")
            add(archive, "hard", type=tarfile.LNKTYPE, linkname=HOST["writable"])
        with tarfile.open("evil.tar") as archive:
            for member in archive.getmembers():
                attempt(lambda: archive.extract(member, ".", filter="fully_trusted"))
        """),
    attack("tar-specials", "no device, pipe or set-user-id program comes out of an archive")("""
        import stat, tarfile
        with tarfile.open("dev.tar", "w") as archive:
            for number, kind in enumerate((tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)):
                info = tarfile.TarInfo(f"d{number}")
                info.type, info.devmajor, info.devminor, info.mode = kind, 1, 1, 0o666
                archive.addfile(info)
        with tarfile.open("dev.tar") as archive:
            for member in archive.getmembers():
                attempt(lambda: archive.extract(member, ".", filter="fully_trusted"))
        for name in os.listdir("."):
            if not stat.S_ISREG(os.lstat(name).st_mode) and not stat.S_ISDIR(os.lstat(name).st_mode):
                breach("made", name)
        """),
    attack(
        "many-members",
        "very many files are stopped",
        ends="ok killed error timeout",
        timeout_s=4.0,
        slow=True,
    )("""
        import zipfile
        with zipfile.ZipFile("many.zip", "w") as archive:
            for number in range(3000):
                archive.writestr(f"d{number}/f", b"")
        with zipfile.ZipFile("many.zip") as archive:
            for name in archive.namelist():
                attempt(archive.extract, name)
        time.sleep(0.4)
        """),
    attack("archive-with-links", "an archive that the code makes of links holds nothing of the machine")("""
        import shutil, tarfile, zipfile
        os.mkdir("in")
        for number, path in enumerate((HOST["canary"], HOST["folder"], "/etc/shadow", "/proc/self/environ")):
            os.symlink(path, f"in/l{number}")
        must_fail("a tar of what links lead to", lambda: tarfile.open("x.tar", "w", dereference=True).add("in"))
        must_fail("a zip", lambda: zipfile.ZipFile("x.zip", "w").write("in/l0"))
        must_fail("a copy", lambda: shutil.copytree("in", "copy"))
        attempt(shutil.make_archive, "y", "zip", HOST["folder"], ".")
        if attempt(lambda: zipfile.ZipFile("y.zip").read("secret")):
            breach("an archive of what links lead to")
        """),
)
