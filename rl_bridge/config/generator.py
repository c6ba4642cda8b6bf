"""`generator.*`: what answers prompts."""

import re
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rl_bridge.config.section import Count, Section

EngineKind = Literal["auto", "vllm", "vllm_async", "openai"]


class GeneratorConfig(Section):
    """`generator.*`: what answers prompts. Replicas of it are `monarch.roles.policy`."""

    engine: EngineKind = "auto"
    """`vllm`: vLLM's engine within the replica's process. `vllm_async`: its AsyncLLM, whose engine has a process of its
    own beside the replica's. `auto`: vllm_async on one GPU, vllm on a CPU and on several GPUs. `openai`: a server that
    already runs; its weights cannot be updated, so it can be evaluated and not trained."""
    tensor_parallel: Count = 1
    """GPUs of a replica, which share each layer: vLLM's tensor parallelism, a process each beside the replica's."""
    url: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """Where an OpenAI-compatible server is, up to and with `/v1`. It has to return token ids (vLLM's does)."""
    model: str | None = Field(default=None, min_length=1)
    """What that server calls the model. `model.path` is the folder of the same model's tokenizer."""
    key_variable: str | None = Field(default=None, min_length=1)
    """The environment variable that holds the server's key; with none no key is sent. The key itself belongs into no
    file: configurations are saved with runs."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
            told = bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is none
            told = False
        if not told or parts.username is not None or parts.query or parts.fragment:
            # Not repeated here: who writes a key into it does not want it in a log.
            raise ValueError(
                "expected generator.url as http://HOST:PORT/v1, got something else, or more: what lets in is the key "
                "in the environment variable that generator.key_variable names, never a part of the address"
            )
        return url.rstrip("/")

    @field_validator("key_variable")
    @classmethod
    def _check_key_variable(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(
                "expected generator.key_variable to be the name of an environment variable, got something that is no "
                "such name; the key itself belongs into the variable"
            )
        return name

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        if self.engine == "openai":
            if self.url is None or self.model is None:
                raise ValueError(
                    "expected generator.url and generator.model with generator.engine=openai, "
                    f"got {self.url!r} and {self.model!r}"
                )
        elif (self.url, self.model, self.key_variable) != (None, None, None):
            raise ValueError(
                "expected generator.url, generator.model and generator.key_variable with generator.engine=openai "
                f"alone, got them with {self.engine}"
            )
        if self.tensor_parallel > 1 and self.engine in ("vllm_async", "openai"):
            raise ValueError(
                f"expected generator.engine of auto or vllm with generator.tensor_parallel, got {self.engine}: of that "
                "engine the processes of several ranks could outlive their replica, or are not ours"
            )
        return self

    def why_untrainable(self) -> str | None:
        """Why this cannot be trained; None where it can."""
        if self.engine != "openai":
            return None
        return (
            f"expected generator.engine of vllm or vllm_async, got openai: the weights of the server at {self.url} "
            "cannot be updated, so every answer would come from a policy that does not learn; "
            "ropewalk evaluate looks at it"
        )
