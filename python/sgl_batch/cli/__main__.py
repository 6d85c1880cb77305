"""`python -m sgl_batch.cli`: the `sgl-batch` command."""

from sgl_batch.cli.main import command

if __name__ == "__main__":
    command()
