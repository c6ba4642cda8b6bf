"""The page to play on: its files, its description of the environment, and authors' own Gradio pages.

The page is a client like any other: it plays over `/ws`.
"""

from servers.page.gradio import PageOptions
from servers.page.routes import PAGE_PATH, Page

__all__ = ["PAGE_PATH", "Page", "PageOptions"]
