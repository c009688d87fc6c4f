"""The run-time side: engine binding, lane clients and the XLA custom calls."""

from dynaflow_xla.errors import EngineError

try:
    from dynaflow_xla.ffi import _engine  # noqa: F401
except ModuleNotFoundError:
    pass  # whoever needs it says so
except ImportError as error:
    if "nanobind" not in str(error):
        raise
    # Its types, lanes and custom calls are the process's: a second one would run calls of the first.
    raise EngineError(
        "this process has the engine of dynaflow_xla already: the package was imported, taken out of "
        f"sys.modules (a reload, or a second copy on sys.path) and imported again, from {__path__[0]}. "
        "A process has one copy, imported once: restart it, or keep the modules that are there"
    ) from error
