"""What a trajectory pays for coming near the greatest length."""


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """0 up to max_length - buffer, falling linearly to -1 at max_length, -1 beyond.

    The soft overlong punishment of DAPO, arXiv 2503.14476, equation 13; it is added to the reward.

    Args:
        length: Tokens that the policy produced.
        max_length: The most that it can.
        buffer: Tokens before that over which the penalty grows, from 1.
    """
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer))
