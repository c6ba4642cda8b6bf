"""Which proxy the environment names for a URL."""

import pytest

from openenv_core.proxies import proxy_for


def test_which_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "socks_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert proxy_for("ws://far.example") is None
    monkeypatch.setenv("http_proxy", "proxy:3128")
    monkeypatch.setenv("https_proxy", "http://secure:3128")
    monkeypatch.setenv("no_proxy", "near.example")
    assert proxy_for("ws://far.example") == "http://proxy:3128"
    assert proxy_for("wss://far.example") == proxy_for("https://far.example") == "http://secure:3128"
    for here in ("ws://near.example", "ws://localhost:1", "ws://127.0.0.9", "ws://[::1]:8"):
        assert proxy_for(here) is None
    for here in ("LocalHost.", "one.localhost", "0.0.0.0:8000", "[::]:8000", "[::ffff:127.0.0.1]"):
        assert proxy_for(f"http://{here}/v1") is None
    for there in ("notlocalhost", "localhost.example", "10.0.0.1", "[::ffff:10.0.0.1]"):
        assert proxy_for(f"http://{there}/v1") == "http://proxy:3128"
