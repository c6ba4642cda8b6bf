"""Episodes, as checks play them: in this process, in another one, over the wire."""
