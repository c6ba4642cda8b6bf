"""The page to play on: its files, what it is told of the environment, and pages that authors make with Gradio.

What is played on it goes over `/ws`, as of any other client.
"""

from servers.page.gradio import PageOptions
from servers.page.routes import PAGE_PATH, Page

__all__ = ["PAGE_PATH", "Page", "PageOptions"]
