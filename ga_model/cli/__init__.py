"""The command line. May import all of the package."""
