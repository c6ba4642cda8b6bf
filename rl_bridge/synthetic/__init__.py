"""A job that trains nothing, for measuring the loop: sleeping environments and a busy trainer under the real loop."""
