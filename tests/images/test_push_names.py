"""Where an image is pushed to, and what becomes of what registries and engines say."""

import pytest

from openenv_core.errors import ConfigurationError
from openenv_core.images import push
from openenv_core.images.errors import NoSuchImage, NotAllowed, NotReached, PushFailed


@pytest.mark.parametrize(
    ("image", "registry", "remote"),
    [
        ("a-env", "registry.example.org/team", "registry.example.org/team/a-env:latest"),
        ("a-env:1", "registry.example.org/team/", "registry.example.org/team/a-env:1"),
        ("old.example.org/x/a-env:1", "localhost:5000", "localhost:5000/a-env:1"),
        ("a-env:1", "127.0.0.1:5000/one/two", "127.0.0.1:5000/one/two/a-env:1"),
        ("a-env:1", "host:5000", "host:5000/a-env:1"),
        ("a-env:1", "docker.io/me", "docker.io/me/a-env:1"),
        ("registry.example.org/me/a-env:1", None, "registry.example.org/me/a-env:1"),
        ("localhost/a", None, "localhost/a:latest"),
    ],
)
def test_an_image_s_name_in_a_registry(image: str, registry: str | None, remote: str) -> None:
    assert push.remote_name(image, registry) == remote


@pytest.mark.parametrize(
    "registry", ["", "team", "https://a.b/c", "a.b/Team", "a.b/c:1", "a.b//c", "a.b/c d"]
)
def test_what_is_no_registry_is_refused(registry: str) -> None:
    with pytest.raises(ConfigurationError, match="expected --registry HOST"):
        push.remote_name("a-env:1", registry)


@pytest.mark.parametrize("image", ["a-env", "team/a-env:1"])
def test_an_image_without_a_registry_needs_one(image: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"whose name has no registry, got none; for one, --registry "
    ):
        push.remote_name(image, None)


@pytest.mark.parametrize(
    ("said", "kind", "remedy"),
    [
        ("denied: requested access to the resource is denied", NotAllowed, "docker login a.b:5000"),
        ("unauthorized: authentication required", NotAllowed, "docker login a.b:5000"),
        ("no basic auth credentials", NotAllowed, "docker login"),
        ("Get http://a.b:5000/v2/: dial tcp: connect: connection refused", NotReached, "insecure-registries"),
        ("Get https://a.b/v2/: x509: certificate signed by unknown authority", NotReached, "certificate"),
        ("An image does not exist locally with the tag: a.b:5000/x", NoSuchImage, "ropewalk build"),
        ("blob upload invalid", PushFailed, "blob upload invalid"),
    ],
)
def test_what_went_wrong_has_a_type(said: str, kind: type[PushFailed], remedy: str) -> None:
    error = push._failure("a.b:5000/x:1", said)
    assert type(error) is kind
    assert remedy in str(error)
