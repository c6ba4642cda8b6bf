"""Container images of environments: what `ropewalk build` and `ropewalk push` do.

Nothing here loads the Docker SDK or the hub's library before it is asked to work with them.
"""
