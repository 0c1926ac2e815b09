"""`python -m offloadkit`: the command line."""

from offloadkit.cli import app

app(prog_name="offloadkit")
