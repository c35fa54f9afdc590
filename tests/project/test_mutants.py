"""What `make mutants` tries is there: its modules and its tests, which a test's new name would leave out."""

from mutants.__main__ import SUITES


def test_the_modules_and_tests_of_every_suite_exist() -> None:
    """As the import demands."""
    assert all(folders and tests for folders, tests in SUITES.values())
