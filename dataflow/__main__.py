"""`python -m dataflow` is the `dataflow` command."""

from dataflow.cli import main

if __name__ == "__main__":
    main()
