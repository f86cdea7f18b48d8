"""`python -m tackboard …` is the same program as `tackboard …`."""

from tackboard.cli.main import run

if __name__ == "__main__":
    run()
