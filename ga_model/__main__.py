"""Run the command line: `python -m ga_model`."""

from ga_model.cli._main import main

raise SystemExit(main())
