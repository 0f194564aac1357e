"""`python -m testbed.cli`, the same as `prfaas`."""

from testbed.cli import main

if __name__ == "__main__":
    main()
