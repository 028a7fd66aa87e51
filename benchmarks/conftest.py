"""Collects ``bench_suites.py``."""


def pytest_configure(config):
    config.addinivalue_line("python_files", "bench_*.py")
    # Inductor imports what torch itself has deprecated.
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning")
