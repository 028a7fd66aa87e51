"""SkyRL's imports work in these tests."""

import typing

import typing_extensions

# SkyRL uses typing.TypedDict in pydantic models, which accept it from Python 3.12 on.
typing.TypedDict = typing_extensions.TypedDict
