"""The templates of `ropewalk init`: an environment called Place Holder, and files that differ in other templates."""
