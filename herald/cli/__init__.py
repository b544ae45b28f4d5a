"""The command line ``herald``: `main.main` is its entry point."""
