"""What a dataset is read with."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class DatasetSettings:
    """What a dataset consists of.

    Attributes:
        source: A file of JSON lines, or the dotted path of an iterable or of what returns one.
        seed: Decides the order.
        shuffle: Whether every epoch has an order of its own.
    """

    source: str
    seed: int
    shuffle: bool = True
