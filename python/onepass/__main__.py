"""`python -m onepass` is the command `onepass`."""

from onepass.cli import app

app(prog_name="onepass")
