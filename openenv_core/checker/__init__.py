"""The checker: what `ropewalk validate` runs, one function a property.

`openenv_core.checker.suite` gives the same checks to an author's own pytest.
"""
