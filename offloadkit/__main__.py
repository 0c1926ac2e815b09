"""`python -m offloadkit`: the command line."""

from offloadkit.doors.cli import app

app(prog_name="offloadkit")
