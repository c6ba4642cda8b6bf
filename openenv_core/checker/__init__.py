"""The checks of `ropewalk validate`, one function per property.

`openenv_core.checker.suite` provides the same checks as pytest functions for an environment's own tests.
"""
