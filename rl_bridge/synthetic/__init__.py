"""A job that trains nothing: sleeping environments and a busy trainer, under the real loop, to measure the loop by."""
