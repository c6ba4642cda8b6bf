"""A language-model policy learns to ask a database with tools, by `config.yaml` in this folder."""
