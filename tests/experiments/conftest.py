"""What tests of experiments share."""

import sys

import pytest

from xkfac import cli


@pytest.fixture
def xkfac(monkeypatch, capfd):
    """Run the command in this process; return its exit code and what it wrote to both outputs."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["xkfac", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as error:
            code = error.code or 0
        output = capfd.readouterr()
        return code, output.out, output.err

    return call
