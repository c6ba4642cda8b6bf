"""docs/clusters.md: its commands and paths are there, and what it says of the manifests is so."""

import argparse
import re
import shlex
from pathlib import Path

from manifests import FOLDER, ROOT, container, named, pod_templates

from rl_bridge.cli.status import COMMAND as STATUS
from rl_bridge.config import Config

TEXT = (ROOT / "docs/clusters.md").read_text(encoding="utf-8")
KUBECTL, AFTERWARDS = (
    block.splitlines() for block in re.findall(r"^```\n(kubectl .*?)^```", TEXT, re.MULTILINE | re.DOTALL)
)


def test_three_commands_deploy_and_start() -> None:
    applied, secret, all_of_it = (shlex.split(line) for line in KUBECTL)
    namespace = named("Namespace", "ropewalk")["metadata"]["name"]
    assert applied[1:3] == ["apply", "-f"]
    assert (ROOT / applied[3]) == FOLDER / "namespace.yaml"
    assert secret[1:5] == ["create", "secret", "generic", "environment"]
    assert secret[5:7] == ["--namespace", namespace]
    (key,) = re.findall(r"^--from-literal=(\w+)=\$\(openssl rand -hex 32\)$", secret[7])
    (volume,) = (one for one in pod_templates()["environment"]["spec"]["volumes"] if one["name"] == "token")
    (mount,) = (one for one in container("environment")["volumeMounts"] if one["name"] == "token")
    assert volume["secret"]["secretName"] == secret[4]
    said = {entry["name"]: entry.get("value") for entry in container("environment")["env"]}
    assert said["ROPEWALK_TOKEN_FILE"] == f"{mount['mountPath']}/{key}"
    assert all_of_it == ["kubectl", "apply", "-k", str(FOLDER.relative_to(ROOT))]


def test_the_commands_for_later_name_what_is_there() -> None:
    run = {entry["name"]: entry.get("value") for entry in container("train")["env"]}["RUN"]
    assert named("Job", "train")
    for line in AFTERWARDS:
        words = shlex.split(line, comments=True)
        assert words[words.index("--namespace") + 1] == "ropewalk"
        assert "train" in words or "job/train" in words
    (status,) = (line.partition(" -- ropewalk status ")[2] for line in AFTERWARDS if " exec " in line)
    assert asked(status).run == run


def test_the_controllers_probes_ask_as_the_command_is_asked() -> None:
    for probe in ("startupProbe", "livenessProbe"):
        shell, option, line = container("train")[probe]["exec"]["command"]
        assert (shell, option) == ("/bin/sh", "-c")
        (words,) = re.findall(r"^ropewalk status (.*) >/dev/null$", line)
        assert asked(words).run == "$RUN"


def asked(words: str) -> argparse.Namespace:
    """What `ropewalk status` makes of its words; ends the test where it does not know them."""
    parser = argparse.ArgumentParser()
    STATUS.configure(parser)
    return parser.parse_args(shlex.split(words))


def test_every_key_is_one() -> None:
    keys = re.findall(r"`((?:monarch|env|rollout|model)\.[a-z_.]+)(?:=[^`]*)?`", TEXT)
    assert len(set(keys)) > 8
    for key in keys:
        section, name = key.split(".")[:2]
        model = Config.model_fields[section].annotation
        fields = getattr(model, "model_fields", None) or model.__args__[0].model_fields  # type: ignore[union-attr]
        assert name in fields or name == "roles", key


def test_every_path_and_file_is_there() -> None:
    for path in re.findall(r"(?<![\w.])(?:examples|dockerfiles|constraints|envs|docs)/[\w./-]+", TEXT):
        assert (ROOT / path.rstrip(".")).exists(), path
    rows = set(re.findall(r"^\| `(\w+\.(?:yaml|py))` \|", TEXT, re.MULTILINE))
    assert rows == {path.name for path in FOLDER.iterdir() if path.is_file()} - {
        "__init__.py",
        "kustomization.yaml",
    }
    assert Path(ROOT / "rl_bridge/services/worker.py").exists()
