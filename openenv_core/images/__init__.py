"""Container images of environments, for `ropewalk build` and `ropewalk push`.

Importing these modules loads neither the Docker SDK nor the hub's library.
"""
