"""Container images of environments, for `ropewalk build` and `ropewalk push`.

The Docker SDK and the hub's library are imported only when they are needed.
"""
