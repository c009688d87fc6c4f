"""The command line ``dynaflow-xla``: what the public functions do, for whoever has a shell and a function."""
