"""From the tree of an episode's calls to the turns that a trainer takes."""

from rl_bridge.gateway.tree import CallNode, CallTree
from rl_bridge.tokens.conversation import Prefix
from rl_bridge.types import Completion, Turn


def turns_of(tree: CallTree) -> list[Turn]:
    """Return the answers to be learned from, each once, branch by branch.

    Within a branch each prompt continues the tokens before it, so `training_rows` makes one row of it. A branch that
    leaves another one begins with the tokens that they share, which are no part of its loss.
    """
    turns: list[Turn] = []
    waiting: list[tuple[CallNode, list[int], int]] = [(root, [], 0) for root in reversed(tree.roots)]
    while waiting:
        node, line, length = waiting.pop()
        if length < len(line):  # the first child has gone on from there
            line = line[:length]
        line += node.added.tolist()
        if tree.is_trained(node):
            completion = Completion(
                tokens=node.tokens.tolist(),
                logprobs=node.logprobs.tolist(),
                versions=node.versions.tolist(),
                stopped=node.stopped,
            )
            turns.append(Turn(prompt=Prefix(line), completion=completion))
        line += node.tokens.tolist()
        waiting += [(child, line, len(line)) for child in reversed(node.children)]
    return turns
