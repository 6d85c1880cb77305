"""The `sgl-batch` command: a subpackage or module for each subcommand, imported only when it is chosen."""
