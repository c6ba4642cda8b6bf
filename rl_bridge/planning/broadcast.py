"""How long new weights are on their way, and what the generators lose by it."""


def broadcast_seconds(size_bytes: float, gbps: float) -> float:
    """How long that many bytes take at a bandwidth, if nothing else holds them up.

    Args:
        size_bytes: Of the weights.
        gbps: Gigabits a second, 10^9 bits each.

    Returns:
        size x 8 / bandwidth, in seconds.
    """
    return size_bytes * 8 / (gbps * 1e9)


def fan_out_seconds(broadcast_s: float, receivers: int, senders: int, most_on_one_host: int) -> float:
    """How long all generators take, each of which fetches a whole version from the trainer's hosts.

    Args:
        broadcast_s: What one of them takes, at the bandwidth of a host.
        receivers: The generators.
        senders: The hosts that they fetch from, the trainer's; each has its share of the weights.
        most_on_one_host: Of the generators: a host takes as many copies as it has.

    Returns:
        broadcast x the greater of receivers / senders and most_on_one_host, in seconds.
    """
    return broadcast_s * max(receivers / senders, most_on_one_host)


def idle_share(broadcast_s: float, rollout_s: float) -> float:
    """The share of its time that a generator waits for weights in a synchronous loop.

    Args:
        broadcast_s: How long each version is on its way.
        rollout_s: How long each generator works between two.

    Returns:
        broadcast / (broadcast + rollout).
    """
    return broadcast_s / (broadcast_s + rollout_s)
