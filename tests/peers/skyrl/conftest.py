"""SkyRL's imports work in the tests here."""

import typing

import typing_extensions

# SkyRL has the one of typing in models of pydantic, which takes it since Python 3.12.
typing.TypedDict = typing_extensions.TypedDict
