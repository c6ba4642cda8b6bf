"""The page to play on: its files, its data about the environment, and authors' Gradio pages.

The page plays over `/ws`, like any other client.
"""

from servers.page.gradio import PageOptions
from servers.page.routes import PAGE_PATH, Page

__all__ = ["PAGE_PATH", "Page", "PageOptions"]
