"""An environment that was written with the released rubrics."""
