"""Helpers for tests of the store and of what is built on it; nothing here is used in production."""
