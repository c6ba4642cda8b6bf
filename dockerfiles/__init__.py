"""The images that ours build on, as data: what `ropewalk build` reads."""
