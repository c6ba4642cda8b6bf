"""`ropewalk init`: a new environment from a template."""
