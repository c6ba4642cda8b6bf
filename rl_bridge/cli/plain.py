"""Text that came from elsewhere, for a terminal: neither rich nor the terminal finds anything to obey in it."""

from rich.markup import escape


def printable(text: str) -> str:
    """The same with a question mark for all that a terminal would act on."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def plain(text: str) -> str:
    """The same as markup of rich's that means just this text."""
    return escape(printable(text))
