"""SkyRL's imports work in these tests."""

import typing

import typing_extensions

# SkyRL uses typing's in pydantic models, which works from Python 3.12 on.
typing.TypedDict = typing_extensions.TypedDict
