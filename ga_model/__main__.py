"""Run the command line: `python -m ga_model`."""

from ga_model._cli import main

raise SystemExit(main())
