"""`python -m pipeline` is the same command as `callsieve`."""

from pipeline.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
