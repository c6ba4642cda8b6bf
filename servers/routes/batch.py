"""Batched requests of `ropewalk.v1`: decodes a request into one call per session, and encodes the replies."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from openenv_core.protocol import batch as wire
from openenv_core.protocol.batch import Array, BatchRequest, ObservationEncoder
from openenv_core.protocol.errors import VALIDATION_ERROR, RefusalError
from openenv_core.protocol.frames import RequestDecoder, encode_model, given_options
from openenv_core.protocol.jsonio import dumps
from servers.metrics import ServerMetrics
from servers.routes.http import refusal_data, refusal_of
from servers.sessions.batch import Member, MemberCall

MAX_REPLY_BYTES: Final = 64 * 1024 * 1024
"""Size above which a reply is split into several frames."""


class BatchDialect:
    """Decodes batched requests and encodes their replies, for one environment class.

    Args:
        decoder: Decodes actions.
        encoder: Encodes observations.
        metrics: Counts errors.
    """

    def __init__(
        self, decoder: RequestDecoder[Any], encoder: ObservationEncoder, metrics: ServerMetrics
    ) -> None:
        self._decoder = decoder
        self._metrics = metrics
        self._encoder = encoder

    def calls(
        self, request: BatchRequest, arrays: list[Array], members: list[Member], size: int
    ) -> list[MemberCall]:
        """Return one call per member; if its action is invalid, the error is already its outcome.

        Args:
            request: The request.
            arrays: The arrays of its frame.
            members: The sessions to call.
            size: Length of its frame.

        Raises:
            RefusalError: VALIDATION_ERROR.
        """
        encode = self._encoder.encode
        match request:
            case wire.ResetRequest(seeds=seeds):
                options = given_options(request.options)
                if seeds is None:
                    return [MemberCall(member, encode, options) for member in members]
                _check_length("seeds", seeds, members)
                return [
                    MemberCall(member, encode, options if seed is None else {**options, "seed": seed})
                    for member, seed in zip(members, seeds, strict=True)
                ]
            case wire.StepRequest(actions=actions):
                if isinstance(actions, dict):
                    try:
                        rows = wire.rows_of(actions, arrays, len(members))
                    except ValueError as error:  # FrameError is one
                        raise RefusalError(VALIDATION_ERROR, str(error)) from None
                else:
                    _check_length("actions", actions, members)
                    rows = list(map(dumps, actions))
                actions_read = self._decoder.actions(rows, size)
                calls = [
                    MemberCall(member, encode, None, action, request.autoreset)
                    for member, action in zip(members, actions_read, strict=True)
                ]
                for call in calls:
                    if isinstance(call.action, Exception) and not call.autoresets:
                        call.outcome = call.action
                return calls
        return [MemberCall(member, encode_model) for member in members]

    def encode_replies(
        self, request_id: int, finished: Sequence[MemberCall], last: bool
    ) -> Iterator[str | bytes]:
        """Yield the reply frames of finished calls; `last` marks the end of the request."""
        frame, errors = self._encode_reply(request_id, finished, last)
        if len(frame) <= MAX_REPLY_BYTES or len(finished) == 1:
            for data in errors.values():
                self._metrics.count_error(data["code"])
            if finished and not finished[0].is_read:  # the frame has copies
                self._encoder.release(
                    [one for call in finished for one in (call.outcome, call.final) if isinstance(one, tuple)]
                )
            yield frame
        else:
            half = len(finished) // 2
            yield from self.encode_replies(request_id, finished[:half], False)
            yield from self.encode_replies(request_id, finished[half:], last)

    def _encode_reply(
        self, request_id: int, finished: Sequence[MemberCall], last: bool
    ) -> tuple[str | bytes, dict[int, dict[str, Any]]]:
        succeeded = [call for call in finished if not isinstance(call.outcome, BaseException)]
        errors: dict[int, dict[str, Any]] = {}
        if len(succeeded) < len(finished):
            errors = {
                call.member.number: refusal_data(refusal_of(call.outcome))
                for call in finished
                if isinstance(call.outcome, BaseException)
            }
        arrays: list[Array] = []
        fields = self._encode_fields(succeeded, arrays)
        if errors:
            fields["errors"] = dumps(errors)
        return wire.encode_reply(request_id, fields, arrays, last=last), errors

    def _encode_fields(self, calls: list[MemberCall], arrays: list[Array]) -> dict[str, bytes]:
        fields = {"members": dumps([call.member.number for call in calls])}
        if not calls:
            return fields
        outcomes = [call.outcome for call in calls]
        if calls[0].is_read:
            return {**fields, "rows": b"[%b]" % b",".join(outcomes)}
        final = [call for call in calls if call.final is not None]
        results = [call.final or call.outcome for call in calls] if final else outcomes
        rewards, terminated, truncated, *_ = zip(*results, strict=True)
        for name, dtype, data in (
            ("reward", "float64", list(rewards)),
            ("terminated", "bool", bytes(terminated)),
            ("truncated", "bool", bytes(truncated)),
        ):
            fields[name] = dumps(len(arrays))
            arrays.append(Array(dtype, (len(calls),), data))
        fields |= self._encoder.combine(outcomes, arrays)
        if final:
            final_observations = self._encoder.combine([call.final for call in final], arrays)
            final_fields = {"members": dumps([call.member.number for call in final]), **final_observations}
            fields["final"] = b"{%b}" % b",".join(
                b'"%b":%b' % (name.encode(), value) for name, value in final_fields.items()
            )
        return fields


def _check_length(name: str, values: Sequence[Any], members: Sequence[Member]) -> None:
    if len(values) != len(members):
        raise RefusalError(VALIDATION_ERROR, f"expected {name} for {len(members)} members, got {len(values)}")
